"""What every route needs of a call beside its body: the service, the caller's key, id and deadline, common headers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import BaseModel

from control_plane.service import EngineService

MAX_TIMEOUT_MS = 3_600_000
MAX_LISTED = 16


def get_service(request: Request) -> EngineService:
    return request.app.state.service


@dataclass(frozen=True, slots=True)
class Context:
    """One HTTP call. `request_id` is its X-Request-Id, `request_name` the same if the caller gave it."""

    service: EngineService
    key_id: str
    request_name: str | None
    timeout_s: float | None
    request_id: str = ""

    def name_call(self, call_id: str) -> None:
        """The call will be answered as `call_id`."""
        self.service.call_names.add(self.request_id, call_id)


def get_context(
    request: Request,
    x_request_timeout_ms: Annotated[
        int | None, Header(ge=1, le=MAX_TIMEOUT_MS, description="deadline of the whole call in milliseconds")
    ] = None,
) -> Context:
    state = request.scope.get("state", {})
    timeout_s = x_request_timeout_ms / 1e3 if x_request_timeout_ms else None
    return Context(
        get_service(request),
        state.get("key_id", ""),
        state.get("request_name"),
        timeout_s,
        state.get("request_id", ""),
    )


CallContext = Annotated[Context, Depends(get_context)]
Service = Annotated[EngineService, Depends(get_service)]


def ignored_header(body: BaseModel, also: Sequence[str] = ()) -> dict[str, str]:
    """X-Ignored-Fields: what was sent and has no effect, bounded in number and length."""
    names = [*also, *(body.model_extra or {})]
    shown = [
        "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64])
        for name in names
    ]
    if len(shown) > MAX_LISTED:
        shown = [*shown[:MAX_LISTED], f"and-{len(shown) - MAX_LISTED}-more"]
    return {"X-Ignored-Fields": ", ".join(shown)} if shown else {}
