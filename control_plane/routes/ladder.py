"""GET /admin/v1/ladder: rungs, demand, the ladder it asks for; POST /admin/v1/ladder/apply puts that in force."""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from control_plane.admin_schemas import CanaryBody, ReasonBody, etag, plan_body, read_body, revision_body
from control_plane.canary import CanarySpec
from control_plane.errors import InvalidConfig, json_response
from control_plane.ladder_advice import MIN_GAIN, AppliedProposal, ladder_patch, propose
from control_plane.live_config import LiveConfig
from control_plane.routes.admin import JSON_BODY, Admin, Caller
from control_plane.routes.context import Service
from runtime.engine.stats import EngineSnapshot
from runtime.ladder.learned import LadderProposal

router = APIRouter(prefix="/admin/v1/ladder", tags=["admin"], default_response_class=Response)


class ApplyBody(ReasonBody):
    """Why, and whether the change is tried first."""

    canary: CanaryBody | None = None

    @property
    def spec(self) -> CanarySpec | None:
        return self.canary.spec if self.canary else None


@router.get("")
async def show(request: Request, service: Service, caller: Caller) -> Response:
    live, snapshot = caller.live, service.model.engine.snapshot()
    proposal, why_none = await asyncio.to_thread(_proposal, snapshot, live)
    applied: AppliedProposal | None = getattr(request.app.state, "applied_ladder", None)
    return json_response(
        {
            "revision": live.revision,
            "max_rungs": live.effective.ladder.max_rungs,
            "change": asdict(snapshot.ladder_change),
            "rungs": [asdict(rung) for rung in snapshot.rungs],
            "demand": _demand(snapshot),
            "proposal": _shown(proposal) if proposal else None,
            "why_no_proposal": why_none,
            "applied": _followed(applied, snapshot, live) if applied else None,
        }
    )


@router.post("/apply", openapi_extra=JSON_BODY)
async def apply(request: Request, service: Service, caller: Caller) -> Response:
    """Plans, stores and compiles; the old ladder serves until every added rung is ready."""
    body = await read_body(request, ApplyBody)
    revision, snapshot = caller.live.revision, service.model.engine.snapshot()
    proposal, why_none = await asyncio.to_thread(_proposal, snapshot, caller.live)
    if proposal is None:
        raise InvalidConfig(f"There is no ladder to propose: {why_none}.", param="ladder")
    answer, number = await apply_patch(caller, ladder_patch(proposal), body, revision)
    if number != revision:
        request.app.state.applied_ladder = AppliedProposal(number, proposal, snapshot)
    return json_response(answer | {"proposal": _shown(proposal)}, headers=etag(number))


async def apply_patch(
    caller: Admin, patch: dict[str, Any], body: ApplyBody, revision: int
) -> tuple[dict[str, Any], int]:
    """Through the same checks and trial as any other change; the answer, and the number of the revision made.

    revision: what the patch was made for; a change in between is refused (412).
    """
    change = await caller.live.plan(patch, body.spec)
    made = await caller.live.change(patch, if_match=revision, canary=body.spec, **caller.author(body.reason))
    return {"plan": plan_body(change, revision), "revision": revision_body(made)}, made.number


def _proposal(snapshot: EngineSnapshot, live: LiveConfig) -> tuple[LadderProposal | None, str]:
    """A proposal that is worth a change, or why there is none."""
    try:
        proposal = propose(snapshot, live.effective)
    except ValueError as error:
        return None, str(error)
    if not proposal.is_change or proposal.gain < MIN_GAIN:
        best = f"the best ladder would spare {100 * max(0.0, proposal.gain):.2f} % of the computed positions"
        return None, "; ".join((f"{best}, less than {100 * MIN_GAIN:g} %", *proposal.notes))
    return proposal, ""


def _shown(proposal: LadderProposal) -> dict[str, Any]:
    return asdict(proposal) | {"predicted_gain": proposal.gain, "patch": ladder_patch(proposal)}


def _followed(applied: AppliedProposal, snapshot: EngineSnapshot, live: LiveConfig) -> dict[str, Any]:
    """Predicted beside realised; `realised` is null while the proposal does not serve.

    `status` is that of its revision: compiling, canary, applied, reverted, failed; null when it is not kept any more.
    """
    realised, revision = applied.observe(snapshot), live.store.get(applied.revision)
    return {
        "revision": applied.revision,
        "status": revision.status if revision else None,
        "is_serving": realised is not None,
        "padding_before": asdict(applied.proposal.padding_now),
        "padding_predicted": asdict(applied.proposal.padding_predicted),
        "predicted_gain": applied.proposal.gain,
        "realised": asdict(realised) if realised else None,
    }


def _demand(snapshot: EngineSnapshot) -> dict[str, list[dict[str, int]]]:
    """Steps by the positions they asked for, since the start."""
    return {
        phase: [{"positions": size, "steps": sizes[size]} for size in sorted(sizes)]
        for phase, sizes in snapshot.demand.items()
    }
