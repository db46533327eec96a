"""GET /admin/v1/requests: the last requests; GET /admin/v1/requests/{id}: the way of one through the engine."""

import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from control_plane.call_names import CallNames
from control_plane.errors import NotFound, clean, json_response
from control_plane.routes.context import Service
from runtime.engine.timelines import Trace, TraceEvent

router = APIRouter(prefix="/admin/v1/requests", tags=["admin"], default_response_class=Response)
MAX_LISTED = 500
OFF = "console.request_timeline is off"


@router.get("")
async def show_all(
    service: Service, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="newest first")] = 50
) -> Response:
    timelines, wire = service.model.engine.timelines, _Wire.now(service.call_names)
    rows = [wire.row(trace) for trace in timelines.newest(limit)]
    reason = "" if timelines.is_on else OFF
    return json_response(
        {"available": timelines.is_on, "reason": reason, "kept": timelines.kept, "data": rows}
    )


@router.get("/{name}")
async def show(name: str, service: Service) -> Response:
    """By X-Request-Id, by the id of the answer, or by the engine's own id of a request."""
    timelines, wire = service.model.engine.timelines, _Wire.now(service.call_names)
    found = timelines.find(frozenset((name, *service.call_names.calls_of(name))))
    if not found:
        why = "it is not among the last ones" if timelines.is_on else OFF
        raise NotFound(f"There is no timeline of {clean(name, 64)!r}: {why}.", param="id")
    return json_response({"data": [wire.timeline(trace) for trace in found]})


@dataclass(frozen=True, slots=True)
class _Wire:
    """Traces as on the wire (control_plane.request_schemas). offset_s: Unix less monotonic."""

    offset_s: float
    names: CallNames

    @classmethod
    def now(cls, names: CallNames) -> "_Wire":
        return cls(time.time() - time.monotonic(), names)

    def row(self, trace: Trace) -> dict[str, Any]:
        response_id = trace.request_id.rpartition("-")[0]
        started, first, end = trace.first_scheduled_s, trace.first_token_s, trace.finished_s
        return {
            "id": trace.request_id,
            "call_id": self.names.name_of(response_id),
            "response_id": response_id,
            "state": trace.state,
            "arrived": trace.arrival_s + self.offset_s,
            "prompt_tokens": trace.num_prompt,
            "cached_tokens": trace.num_cached,
            "generated_tokens": trace.num_generated,
            "finish_reason": trace.finish_reason,
            "queue_s": _between(trace.arrival_s, started),
            "prefill_s": _between(started, first),
            "ttft_s": _between(trace.arrival_s, first),
            "decode_s": _between(first, end),
            "e2e_s": _between(trace.arrival_s, end),
            "num_preemptions": trace.num_preemptions,
        }

    def timeline(self, trace: Trace) -> dict[str, Any]:
        arrived = {"time": trace.arrival_s + self.offset_s, "offset_s": 0.0, "kind": "arrived"}
        events = sorted(trace.events, key=lambda event: event.time_s)
        return self.row(trace) | {
            "events": [arrived, *(self._event(event, trace.arrival_s) for event in events)],
            "rungs": trace.rungs,
            "num_dropped": trace.num_dropped,
        }

    def _event(self, event: TraceEvent, arrival_s: float) -> dict[str, Any]:
        return {
            "time": event.time_s + self.offset_s,
            "offset_s": event.time_s - arrival_s,
            "kind": event.kind,
            "rung": event.rung,
            "duration_s": event.duration_s,
            "tokens": event.tokens,
            "launches": event.launches,
            "detail": event.detail,
        }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)
