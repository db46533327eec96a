"""Fixtures: a service over the fake engine, reached in process or over a real socket."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from control_plane.app import create_app
from control_plane.config_state import open_state
from control_plane.drain import DrainingServer, uvicorn_config
from control_plane.service import EngineService
from runtime.config import EngineConfig, parse_config
from tests.control_plane.fake_engine import FakeEngine, served
from tests.patience import PATIENCE_S, until


@dataclass(slots=True)
class Running:
    """A server on a loopback port."""

    base_url: str
    port: int
    service: EngineService
    engine: FakeEngine
    server: DrainingServer

    def connect(self, timeout_s: float = PATIENCE_S) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)


def make_config(**server: Any) -> EngineConfig:
    return parse_config(
        {"server": {"port": 0, "max_body_size": "1MiB", **server}, "model": {"aliases": ["gpt-alias"]}}
    )


@contextmanager
def running(
    engine: FakeEngine, config: EngineConfig | None = None, stall_s: float = 30.0
) -> Iterator[Running]:
    """Serves `engine` from a thread until the block ends."""
    service = attached(engine, config or make_config(), stall_s)
    server = DrainingServer(uvicorn_config(create_app(service), service), service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, service, engine, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        engine.shutdown(5)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    found = FakeEngine()
    yield found
    found.shutdown(5)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """The app in process, over the fake engine."""
    async with in_process(engine) as found:
        yield found


def attached(engine: FakeEngine, config: EngineConfig, stall_s: float = 30.0) -> EngineService:
    """A service over the engine, which starts with what the service's state says."""
    state = open_state(config)
    service = EngineService(state.config, stall_s=stall_s, state=state)
    engine.configuration.start_with(state.config)
    service.attach(served(engine))
    return service


def in_process(
    engine: FakeEngine, config: EngineConfig | None = None, base_url: str = "http://test"
) -> "_InProcess":
    return _InProcess(engine, config or make_config(), base_url)


class _InProcess:
    def __init__(self, engine: FakeEngine, config: EngineConfig, base_url: str) -> None:
        self._base_url = base_url
        self.service = attached(engine, config)

    async def __aenter__(self) -> httpx.AsyncClient:
        app = create_app(self.service)
        self._lifespan = app.router.lifespan_context(app)
        await self._lifespan.__aenter__()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url=self._base_url, timeout=10)
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        await self._lifespan.__aexit__(None, None, None)


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    """One server for a module's tests that need a socket; a step takes a millisecond."""
    with ExitStack() as stack:
        yield stack.enter_context(running(FakeEngine(step_s=0.001)))
