"""GET /admin/v1/experts: where experts lie and what their devices compute; POST rebalance, pause and pin steer the moves."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from control_plane.admin_schemas import ReasonBody, read_body
from control_plane.errors import json_response
from control_plane.live_audit import audit_order
from control_plane.routes.admin import JSON_BODY, Admin, Caller
from control_plane.routes.context import Service
from control_plane.service import EngineService
from runtime.engine.expert_status import MAX_PINNED, ExpertAnswer, ExpertOrder
from runtime.errors import InvalidRequest, Unavailable

ANSWER_TIMEOUT_S = 30.0

router = APIRouter(prefix="/admin/v1/experts", tags=["admin"], default_response_class=Response)


class RebalanceBody(ReasonBody):
    """dry_run: show the plan, move nothing."""

    dry_run: bool = False


class PauseBody(ReasonBody):
    """paused: nothing moves by itself, and what waits is dropped; an operator's own rebalance still does."""

    paused: bool


class PinBody(ReasonBody):
    """layers: those whose experts stay where they are; an empty list lets all move."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=MAX_PINNED, strict=False)


@router.get("")
async def show(service: Service, caller: Caller) -> Response:
    """`experts` is null on one device, where nothing can move; `hosts` is empty where one process has all devices;
    `residency` is null where all experts are resident.
    """
    snapshot = service.model.engine.snapshot()
    experts = asdict(snapshot.experts) if snapshot.experts else None
    residency = asdict(snapshot.residency) if snapshot.residency else None
    hosts = [asdict(host) for host in snapshot.hosts]
    return json_response({"experts": experts, "residency": residency, "hosts": hosts})


@router.post("/rebalance", openapi_extra=JSON_BODY)
async def rebalance(request: Request, service: Service, caller: Caller) -> Response:
    """All moves to the best placement for the load of late; applied a few a step, `waiting_moves` tells how many wait."""
    body = await read_body(request, RebalanceBody)
    wish = "plan" if body.dry_run else "apply"
    answer = await _carry_out(
        service, caller, ExpertOrder(rebalance=wish), body.reason, is_change=not body.dry_run
    )
    return json_response({"dry_run": body.dry_run} | asdict(answer))


@router.post("/pause", openapi_extra=JSON_BODY)
async def pause(request: Request, service: Service, caller: Caller) -> Response:
    body = await read_body(request, PauseBody)
    return json_response(
        asdict((await _carry_out(service, caller, ExpertOrder(is_paused=body.paused), body.reason)).status)
    )


@router.post("/pin", openapi_extra=JSON_BODY)
async def pin(request: Request, service: Service, caller: Caller) -> Response:
    body = await read_body(request, PinBody)
    order = ExpertOrder(pinned_layers=tuple(sorted(set(body.layers))))
    return json_response(asdict((await _carry_out(service, caller, order, body.reason)).status))


async def _carry_out(
    service: EngineService, caller: Admin, order: ExpertOrder, reason: str, is_change: bool = True
) -> ExpertAnswer:
    """By the engine's thread, and into the audit. Raises 422 where the order does not fit."""
    wish: dict[str, Any] = {name: value for name, value in asdict(order).items() if value is not None}
    result = "done"
    try:
        future = service.model.engine.order_experts(order)
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_TIMEOUT_S)
    except TimeoutError:
        result = "unanswered"
        raise Unavailable(f"the engine has not answered for {ANSWER_TIMEOUT_S:g} s") from None
    except InvalidRequest as fault:
        fault.status, result = 422, f"422 {fault.code}"
        raise
    finally:
        if is_change:
            await audit_order(caller.live.audit, "experts", caller.author(reason), wish, result)
