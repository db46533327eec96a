"""Bearer keys: deny by default once a key is set. Keys are known by their SHA-256 digest only."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.errors import error_body, json_response

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
MAX_KEY_BYTES = 512


class BearerAuth:
    """ASGI middleware. Every path but the health routes needs a key, those that do not exist included."""

    def __init__(self, app: ASGIApp, digests: Sequence[str]) -> None:
        self.app = app
        self._digests = tuple(d.lower() for d in digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            key_id = self._identify(scope)
            if key_id is None:
                body = error_body(
                    "Incorrect or missing API key.", type="authentication_error", code="invalid_api_key"
                )
                await json_response(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope.setdefault("state", {})["key_id"] = key_id
        await self.app(scope, receive, send)

    def _identify(self, scope: Scope) -> str | None:
        """The digest's first characters, or None. Every digest is compared, whichever matches."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1 or len(values[0]) > MAX_KEY_BYTES:
            return None
        scheme, _, key = values[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).hexdigest()
        matches = [known for known in self._digests if hmac.compare_digest(known, digest)]
        return matches[0][:12] if matches and scheme.lower() == b"bearer" else None
