"""Leaving: not ready while still admitting, then closed, then a bounded wait, then cancelled with an error event."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from control_plane import drain as drain_module
from control_plane.drain import drain
from control_plane.service import EngineService, Phase
from tests.control_plane.conftest import in_process, running
from tests.control_plane.fake_engine import FakeEngine
from tests.patience import PATIENCE_S, until, until_async

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {"model": "fake", "prompt": "ab", "max_tokens": 4000, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": "fake", "prompt": "ab"}


async def test_the_whole_way(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain's two times end when the test says so."""
    delay_over, patience = asyncio.Event(), asyncio.timeout(None)

    async def sleep(seconds: float) -> None:
        await (delay_over.wait() if seconds == 3600 else asyncio.sleep(seconds))

    def timeout(seconds: float) -> asyncio.Timeout:
        return patience if seconds == 7200 else asyncio.timeout(seconds)

    monkeypatch.setattr(drain_module, "asyncio", SimpleNamespace(sleep=sleep, timeout=timeout))
    engine.step_s = 0.02
    process = in_process(engine)
    async with process as client:
        stream = asyncio.ensure_future(client.post("/v1/completions", json=LONG | {"stream": True}))
        whole = asyncio.ensure_future(client.post("/v1/completions", json=LONG))
        await until_async(lambda: engine.num_held == 2)
        leaving = asyncio.ensure_future(drain(process.service, 3600, 7200))
        await until_async(lambda: process.service.phase is Phase.LEAVING)
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
        assert process.service.phase is Phase.LEAVING
        delay_over.set()
        await until_async(lambda: process.service.phase is Phase.CLOSED)
        refused = await client.post("/v1/completions", json=SHORT)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert not stream.done()
        assert not whole.done()
        patience.reschedule(asyncio.get_running_loop().time())
        await leaving
        *_, error, done = (await stream).text.strip().split("\n\n")
        assert orjson.loads(error.removeprefix("data: "))["error"]["code"] == "server_is_overloaded"
        assert done == "data: [DONE]"
        assert (await whole).status_code == 503
        await until_async(lambda: engine.num_held == 0)


async def test_nothing_to_wait_for(engine: FakeEngine) -> None:
    process = in_process(engine)
    async with process:
        start = time.monotonic()
        await drain(process.service, 0.0, 30)
        assert time.monotonic() - start < 15


async def test_running_requests_finish(engine: FakeEngine) -> None:
    engine.step_s = 0.005
    process = in_process(engine)
    async with process as client:
        task = asyncio.ensure_future(client.post("/v1/completions", json=LONG | {"max_tokens": 40}))
        await until_async(lambda: engine.num_held == 1)
        await drain(process.service, 0.0, PATIENCE_S)
        assert (await task).json()["choices"][0]["finish_reason"] == "length"


def test_listener_stays_open_during_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    async def gated(service: EngineService, delay_s: float, timeout_s: float) -> None:
        service.leave()
        await asyncio.to_thread(may_go_on.wait, PATIENCE_S)
        await drain(service, 0, PATIENCE_S)

    monkeypatch.setattr(drain_module, "drain", gated)
    with running(FakeEngine()) as live:
        live.server.handle_exit(signal.SIGTERM, None)
        until(lambda: live.service.phase is Phase.LEAVING)
        assert httpx.get(f"{live.base_url}/health/ready").status_code == 503
        assert httpx.post(f"{live.base_url}/v1/completions", json=SHORT).status_code == 200
        assert not live.server.should_exit
        may_go_on.set()
        until(lambda: live.server.should_exit)


SCRIPT = """
import sys
from control_plane.app import create_app
from control_plane.drain import DrainingServer, uvicorn_config
from control_plane.service import EngineService
from tests.control_plane.conftest import make_config
from tests.control_plane.fake_engine import FakeEngine, served
service = EngineService(make_config(drain_delay="200ms", drain_timeout="60s"))
service.attach(served(FakeEngine(step_s=0.02)))
server = DrainingServer(uvicorn_config(create_app(service), service), service)
async def startup(sockets=None):
    await DrainingServer.startup(server, sockets)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
server.startup = startup
server.run()
sys.exit(1 if server.force_exit else 0)
"""


@pytest.mark.parametrize(("num_signals", "code"), [(1, 0), (2, 1)])
def test_signals_of_a_real_process(num_signals: int, code: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        num_tokens = 30 if num_signals == 1 else 4000
        body = LONG | {"stream": True, "max_tokens": num_tokens}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if num_signals == 2:
                until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S / 2) == code
                return
            assert "data: [DONE]" in list(lines)
        assert process.wait(PATIENCE_S / 2) == code
    finally:
        process.kill()
        process.communicate()
