"""Who may use /admin: operators by key, viewers by key for what changes nothing, anyone on loopback in demo mode.

Denied by default for everything below the prefix, whether it exists or not. API keys open nothing here.
"""

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.auth import ADMIN_PREFIX, identify, no_key
from control_plane.errors import status_response
from runtime.config import ServerConfig

READING = frozenset({"GET", "HEAD"})
DRY_RUNS = frozenset({"/admin/v1/config/plan"})
DEMO_ACTOR = "demo"
OPERATOR, VIEWER = "operator", "viewer"


class AdminAuth:
    """ASGI middleware. Puts `actor` (12 hex digits of the key's digest, or "demo") and `role` into the scope's state.

    on_refused: called with the status of each refusal.
    """

    def __init__(self, app: ASGIApp, server: ServerConfig, on_refused: Callable[[str], None]) -> None:
        self.app = app
        self._server, self._on_refused = server, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(ADMIN_PREFIX):
            found = self._actor(scope)
            if isinstance(found, Response):
                self._on_refused(str(found.status_code))
                await found(scope, receive, send)
                return
            actor, role = found
            scope.setdefault("state", {}).update(actor=actor, role=role)
        await self.app(scope, receive, send)

    def _actor(self, scope: Scope) -> tuple[str, str] | Response:
        """Who it is, and "operator" or "viewer"."""
        server = self._server
        if not (server.admin_keys or server.viewer_keys):
            return self._demo_actor(scope)
        operator, viewer = identify(scope, server.admin_keys), identify(scope, server.viewer_keys)
        if operator is not None:
            return operator, OPERATOR
        if viewer is None:
            return no_key("Incorrect or missing operator key.")
        if scope["method"] in READING or (scope["method"], scope["path"]) in {("POST", p) for p in DRY_RUNS}:
            return viewer, VIEWER
        return status_response(403, "This key may look and plan, not change.")

    def _demo_actor(self, scope: Scope) -> tuple[str, str] | Response:
        """Without keys only this machine may come in, and no web page that a browser on it has open.

        A page of another site reaches us under our address with its own Origin, or, after its name was made to point
        here, with its own Host.
        """
        if not (self._server.demo and is_loopback(self._server.host)):
            return status_response(403, "The admin routes need an operator key: set server.admin_keys.")
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if len(hosts) != 1 or not is_loopback(_host_name(hosts[0])):
            return status_response(403, "Without an operator key the Host must be a loopback name.")
        if any(origin.lower() != f"http://{hosts[0]}".lower() for origin in origins):
            return status_response(403, "Without an operator key no other Origin may call the admin routes.")
        return DEMO_ACTOR, OPERATOR


def is_loopback(host: str) -> bool:
    """Whether an address, or the one name that means it everywhere, is this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_name(host: str) -> str:
    """The name of a Host header, without port and brackets; empty when it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
