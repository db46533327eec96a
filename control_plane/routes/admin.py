"""/admin/v1: the configuration of the serving engine, its history, its audit, trials and the controllers' decisions.

Who may come in is AdminAuth's affair; what a change does is LiveConfig's.
"""

import asyncio
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from control_plane.admin_schemas import (
    ChangeBody,
    ReasonBody,
    RollbackBody,
    canary_body,
    config_body,
    decision_body,
    etag,
    plan_body,
    read_body,
    revision_body,
    revision_of,
)
from control_plane.config_document import schema
from control_plane.errors import json_response
from control_plane.live_config import LiveConfig
from control_plane.routes.context import Service, get_service

router = APIRouter(prefix="/admin/v1", tags=["admin"], default_response_class=Response)

JSON_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
Before = Annotated[int | None, Query(ge=1, le=1 << 53, description="numbers below this, newest first")]
Limit = Annotated[int, Query(ge=1, le=100)]
IfMatch = Annotated[str | None, Header(description='ETag of the revision that is changed, for example "7"')]


@dataclass(frozen=True, slots=True)
class Admin:
    """One call by an operator or viewer."""

    live: LiveConfig
    actor: str
    request_id: str

    def author(self, reason: str) -> dict[str, str]:
        return {"actor": self.actor, "reason": reason, "request_id": self.request_id}


def get_admin(request: Request) -> Admin:
    """Raises Unavailable while the model loads."""
    state = request.scope["state"]
    return Admin(get_service(request).live, state["actor"], state["request_id"])


Caller = Annotated[Admin, Depends(get_admin)]


@router.get("/config")
async def get_config(service: Service, caller: Caller) -> Response:
    live = caller.live
    survives = service.state.folder is not None
    return json_response(config_body(live, live.effective, survives), headers=etag(live.revision))


@router.get("/config/schema")
async def get_schema() -> Response:
    return json_response(schema())


@router.post("/config/plan", openapi_extra=JSON_BODY)
async def plan(request: Request, caller: Caller) -> Response:
    """What a change would do. Changes nothing."""
    body = await read_body(request, ChangeBody)
    change = await caller.live.plan(body.patch, body.spec)
    return json_response(plan_body(change, caller.live.revision), headers=etag(caller.live.revision))


@router.patch("/config", openapi_extra=JSON_BODY)
async def patch_config(request: Request, caller: Caller, if_match: IfMatch = None) -> Response:
    revision = revision_of(if_match, caller.live.revision)
    body = await read_body(request, ChangeBody)
    made = await caller.live.change(
        body.patch, if_match=revision, canary=body.spec, **caller.author(body.reason)
    )
    return json_response(revision_body(made), headers=etag(made.number))


@router.get("/config/history")
async def history(caller: Caller, before: Before = None, limit: Limit = 50) -> Response:
    found = caller.live.history(before, limit)
    following = found[-1].number if len(found) == limit and found[-1].number > 1 else None
    return json_response({"data": [revision_body(revision) for revision in found], "before": following})


@router.post("/config/rollback", openapi_extra=JSON_BODY)
async def rollback(request: Request, caller: Caller, if_match: IfMatch = None) -> Response:
    """A new revision that is what an old one was."""
    revision = revision_of(if_match, caller.live.revision)
    body = await read_body(request, RollbackBody)
    made = await caller.live.rollback(body.revision, if_match=revision, **caller.author(body.reason))
    return json_response(revision_body(made), headers=etag(made.number))


@router.get("/audit")
async def audit(caller: Caller, before: Before = None, limit: Limit = 50) -> Response:
    found = await asyncio.to_thread(caller.live.audit.page, before, limit)
    following = found[-1]["number"] if len(found) == limit and found[-1]["number"] > 1 else None
    return json_response({"data": found, "before": following})


@router.get("/audit/verify")
async def verify(caller: Caller) -> Response:
    return json_response(asdict(await asyncio.to_thread(caller.live.audit.verify)))


@router.get("/decisions")
async def decisions(
    service: Service,
    after: Annotated[int, Query(ge=0, le=1 << 53, description="numbers above this, oldest first")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    found = service.model.engine.decisions(after, limit)
    return json_response({"data": [decision_body(decision) for decision in found]})


@router.get("/canary")
async def canary(caller: Caller) -> Response:
    return json_response(canary_body(caller.live))


@router.post("/canary/accept", openapi_extra=JSON_BODY)
async def accept(request: Request, caller: Caller) -> Response:
    body = await read_body(request, ReasonBody)
    made = await caller.live.accept_canary(**caller.author(body.reason))
    return json_response(revision_body(made), headers=etag(caller.live.revision))


@router.post("/canary/revert", openapi_extra=JSON_BODY)
async def revert(request: Request, caller: Caller) -> Response:
    body = await read_body(request, ReasonBody)
    made = await caller.live.revert_canary(**caller.author(body.reason))
    return json_response(revision_body(made), headers=etag(caller.live.revision))
