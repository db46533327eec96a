"""Names every HTTP call (X-Request-Id), answers what escaped the app, and counts answers by status."""

import logging
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.errors import status_response
from control_plane.metrics import HttpCounts

_SAFE = re.compile(rb"[A-Za-z0-9._\-]{1,128}")
log = logging.getLogger(__name__)


class RequestId:
    """Outermost ASGI middleware: whatever goes wrong below, the client gets OpenAI's body, never a trace."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self.app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id" and _SAFE.fullmatch(v)), None)
        if given is not None:
            scope.setdefault("state", {})["request_name"] = given.decode()
        request_id = given or secrets.token_hex(8).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        has_started = False

        async def named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                self._counts.add(scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, named)
        except Exception:
            log.exception("request %s failed", request_id.decode())
            if not has_started:
                await status_response(500, "The server failed to handle the request.")(scope, receive, named)
