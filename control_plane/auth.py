"""Bearer keys of the API: deny by default once a key is set. Keys are known by their SHA-256 digest only."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.errors import error_body, json_response

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ADMIN_PREFIX = "/admin"  # control_plane.admin_auth guards what is below; API keys open nothing there
MAX_KEY_BYTES = 512


class BearerAuth:
    """ASGI middleware. Every path but health and admin routes needs a key, those that do not exist included."""

    def __init__(self, app: ASGIApp, digests: Sequence[str]) -> None:
        self.app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_open(scope["path"]):
            key_id = identify(scope, self._digests)
            if key_id is None:
                await no_key("Incorrect or missing API key.")(scope, receive, send)
                return
            scope.setdefault("state", {})["key_id"] = key_id
        await self.app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(ADMIN_PREFIX)


def identify(scope: Scope, digests: Sequence[str]) -> str | None:
    """The first characters of the digest of the caller's key, or None. Every digest is compared, whichever matches."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1 or len(values[0]) > MAX_KEY_BYTES:
        return None
    scheme, _, key = values[0].partition(b" ")
    digest = hashlib.sha256(key.strip()).hexdigest()
    matches = [known for known in digests if hmac.compare_digest(known.lower(), digest)]
    return matches[0][:12].lower() if matches and scheme.lower() == b"bearer" else None


def no_key(message: str) -> Response:
    body = error_body(message, type="authentication_error", code="invalid_api_key")
    return json_response(body, 401, {"WWW-Authenticate": "Bearer"})
