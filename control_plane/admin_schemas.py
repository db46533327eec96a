"""Bodies of the admin routes, checked, and the shapes of their answers."""

from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import HTTPException, Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from control_plane.canary import KEPT_S, CanarySpec, Metric
from control_plane.config_document import FILE_ONLY, document, public
from control_plane.config_store import Revision
from control_plane.errors import PreconditionMissing, StaleRevision, validation_fault
from control_plane.live_config import LiveConfig
from runtime.adaptive.decision import Decision
from runtime.config import EngineConfig
from runtime.config_values import parse_duration
from runtime.engine.change import ConfigChange
from runtime.errors import InvalidRequest

JSON_TYPES = ("application/json", "application/merge-patch+json")
MAX_REASON_CHARS = 500
MIN_GUARD_S = 1.0


def _guard_period(seconds: float) -> float:
    if not MIN_GUARD_S <= seconds <= KEPT_S:
        raise ValueError(f"{seconds:g} s is not between {MIN_GUARD_S:g} s and {KEPT_S:g} s")
    return seconds


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class CanaryBody(_Body):
    """A trial: see CanarySpec."""

    guard_period: Annotated[float, BeforeValidator(parse_duration), AfterValidator(_guard_period)]
    metric: Metric
    max_worse_percent: float = Field(20.0, gt=0, le=1000)
    min_requests: int = Field(30, ge=1, le=1_000_000)

    @property
    def spec(self) -> CanarySpec:
        return CanarySpec(self.guard_period, self.metric, self.max_worse_percent, self.min_requests)


class ChangeBody(_Body):
    """A merge patch over the configuration; null gives a field its default back."""

    patch: dict[str, Any]
    reason: str = Field("", max_length=MAX_REASON_CHARS)
    canary: CanaryBody | None = None

    @property
    def spec(self) -> CanarySpec | None:
        return self.canary.spec if self.canary else None


class RollbackBody(_Body):
    revision: int = Field(ge=1, le=10**9)
    reason: str = Field("", max_length=MAX_REASON_CHARS)


class ReasonBody(_Body):
    reason: str = Field("", max_length=MAX_REASON_CHARS)


async def read_body[B: BaseModel](request: Request, model: type[B]) -> B:
    """The body as `model`. Raises 415 for another type (a page of another site cannot send JSON unasked), 400 for what
    is no JSON, 422 for what does not fit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        raise HTTPException(415, f"Content-Type must be {JSON_TYPES[0]}.")
    try:
        data = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        fault = InvalidRequest(f"The body is not JSON: {error}.")
        fault.code = "invalid_json"
        raise fault from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = validation_fault(error.errors())  # type: ignore[arg-type]
        fault.status = 422
        raise fault from None


def revision_of(if_match: str | None, current: int) -> int:
    """The revision that If-Match names. Raises PreconditionMissing, StaleRevision for what never was an ETag of ours."""
    if if_match is None or if_match.strip() == "*":
        raise PreconditionMissing(
            'If-Match must hold the ETag of the configuration that was read, for example "7".',
            param="If-Match",
        )
    text = if_match.strip()
    number = text[1:-1] if len(text) > 2 and text[0] == text[-1] == '"' else ""
    if not (number.isascii() and number.isdigit() and len(number) <= 15):
        raise StaleRevision(f"If-Match is not the ETag of the current revision, which is {current}.", current)
    return int(number)


def etag(revision: int) -> dict[str, str]:
    return {"ETag": f'"{revision}"', "Cache-Control": "no-store"}


def config_body(live: LiveConfig, in_force: EngineConfig, survives: bool) -> dict[str, Any]:
    """`stored` is what a restart would serve, `effective` what is in force; the digests of keys are left out."""
    newest = live.newest
    server = in_force.server
    return {
        "revision": newest.number,
        "status": newest.status,
        "problem": newest.error or None,
        "pending_restart": live.pending_restart,
        "canary": live.trial.revision if live.trial else None,
        "survives_restart": survives,
        "num_keys": {
            "api": len(server.api_keys),
            "admin": len(server.admin_keys),
            "viewer": len(server.viewer_keys),
        },
        "file_only": sorted(FILE_ONLY),
        "effective": public(document(in_force)),
        "stored": public(document(live.stored)),
        "defaults": public(document(EngineConfig())),
    }


def plan_body(change: ConfigChange, revision: int) -> dict[str, Any]:
    return {"revision": revision} | asdict(change)


def revision_body(revision: Revision) -> dict[str, Any]:
    return {key: value for key, value in asdict(revision).items() if key != "base"}


def decision_body(decision: Decision) -> dict[str, Any]:
    return {
        "number": decision.number,
        "time_s": decision.time_s,
        "controller": decision.controller,
        "previous": decision.previous,
        "value": decision.value,
        "reason": decision.reason,
        "inputs": dict(decision.inputs),
    }


def canary_body(live: LiveConfig) -> dict[str, Any]:
    """The trial that runs, with what is left of its guard period; null when none does."""
    trial = live.trial
    if trial is None:
        return {"canary": None}
    verdict = live.verdict(trial)
    return {
        "canary": {
            "revision": trial.revision,
            "spec": asdict(trial.spec),
            "before": asdict(trial.before),
            "since": asdict(verdict.since),
            "worse_percent": verdict.worse_percent,
            "is_extended": trial.is_extended,
            "left_s": live.left_s(trial),
            "state": verdict.reason,
        }
    }
