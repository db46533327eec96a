"""create_app: the ASGI application around an EngineService. Middleware from the outside in: id, keys, limits, routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from control_plane.admin_auth import AdminAuth
from control_plane.auth import BearerAuth
from control_plane.console.pages import ConsolePages
from control_plane.errors import install_handlers
from control_plane.limits import BodyLimit
from control_plane.metrics import ControlFigures, HttpCounts, Metrics
from control_plane.request_id import RequestId
from control_plane.routes import (
    admin,
    chat,
    completions,
    console,
    diagnosis,
    experts,
    ladder,
    models,
    observe,
    requests,
    tokenize,
)
from control_plane.routes.observe import server_version
from control_plane.service import EngineService


def create_app(service: EngineService) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="moe-ladder",
        version=server_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    counts = HttpCounts()
    app.state.service = service
    app.state.console = ConsolePages(service)
    app.state.metrics = Metrics(
        lambda: service.snapshot, lambda: service.model.card.name, counts, lambda: _figures(service)
    )
    install_handlers(app)
    for routes in (
        chat,
        completions,
        models,
        tokenize,
        observe,
        admin,
        ladder,
        experts,
        diagnosis,
        console,
        requests,
    ):
        app.include_router(routes.router)
    server = service.config.server
    app.add_middleware(BodyLimit, max_bytes=server.max_body_size.of(0))
    app.add_middleware(AdminAuth, server=server, on_refused=service.state.audit.count_refused)
    app.add_middleware(BearerAuth, digests=server.api_keys)
    app.add_middleware(RequestId, counts=counts)
    return app


def _figures(service: EngineService) -> ControlFigures | None:
    live = service.live_config
    if live is None:
        return None
    return ControlFigures(live.revision, dict(live.counts), service.model.engine.decision_counts())
