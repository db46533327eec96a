"""The service: admission, deadlines, failing engines, slow consumers, streams that end with an error."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from control_plane import service as service_module
from control_plane import streams
from control_plane.call import MAX_PENDING_EVENTS, Call
from control_plane.errors import EngineFault
from control_plane.service import EngineService
from runtime.engine.host_status import HostStatus
from runtime.request import FinishReason, Request, TokenEvent
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine
from tests.patience import PATIENCE_S, until_async

BODY: dict[str, Any] = {"model": "fake", "prompt": "ab", "max_tokens": 4000, "ignore_eos": True}


async def ask(
    client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY | fields, headers=headers)


def last_events(answer: httpx.Response) -> tuple[dict[str, Any], str]:
    *_, error, done = [
        line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data:")
    ]
    return orjson.loads(error), done


async def test_full_queue_is_429_with_retry_after() -> None:
    engine = FakeEngine(max_queue=1)
    async with in_process(engine) as client:
        answer = await ask(client, n=2)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    engine.shutdown()


@pytest.mark.parametrize("state", ["loading", "failed"])
async def test_nothing_can_serve_is_503(engine: FakeEngine, state: str) -> None:
    async with in_process(engine) as client:
        engine.state = state
        answer = await ask(client)
        ready = await client.get("/health/ready")
        live = await client.get("/health/live")
    assert answer.status_code == ready.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert ready.json() == {"ready": False, "state": state}
    assert live.status_code == (503 if state == "failed" else 200)


async def test_before_the_model_is_there() -> None:
    service = EngineService(make_config())
    process = in_process(FakeEngine())
    process.service = service
    async with process as client:
        assert (await ask(client)).status_code == 503
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/health/ready")).json()["state"] == "loading"
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        service.fail_to_load("no such file /a/b/c.json")
        assert (await client.get("/health/live")).status_code == 503
        assert (await client.get("/health/ready")).json()["state"] == "failed"


async def test_deadline_ends_a_whole_answer_with_429(engine: FakeEngine) -> None:
    engine.step_s = 0.01
    async with in_process(engine) as client:
        answer = await ask(client, {"X-Request-Timeout-Ms": "100"})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    await until_async(lambda: engine.num_held == 0)


async def test_deadline_ends_a_stream_with_an_error_event(engine: FakeEngine) -> None:
    engine.step_s = 0.01
    async with in_process(engine) as client:
        error, done = last_events(await ask(client, {"X-Request-Timeout-Ms": "100"}, stream=True))
    assert error["error"]["code"] == "deadline_exceeded"
    assert done == "[DONE]"


async def test_hopeless_deadline_is_refused_at_once() -> None:
    engine = FakeEngine(step_s=0.01, max_rows=1)
    async with in_process(engine) as client:
        waiting = [asyncio.ensure_future(ask(client)) for _ in range(3)]
        await until_async(lambda: engine.num_held == 3)
        answer = await ask(client, {"X-Request-Timeout-Ms": "1000"})
        assert (answer.status_code, len(engine.submitted)) == (429, 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    engine.shutdown()


async def test_engine_error_is_500_or_an_error_event(engine: FakeEngine) -> None:
    engine.error_after = 2
    async with in_process(engine) as client:
        whole = await ask(client)
        error, done = last_events(await ask(client, stream=True))
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")
    assert (error["error"]["code"], done) == ("engine_error", "[DONE]")


async def test_failed_engine_ends_what_hangs(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "WATCH_S", 0.02)
    async with in_process(engine) as client:
        engine.is_stuck = True
        task = asyncio.ensure_future(ask(client))
        await until_async(lambda: engine.num_held == 1)
        engine.state = "failed"
        assert (await task).status_code == 500


async def test_keep_alive_comments_while_nothing_comes(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call.batches, "__defaults__", (0.05,))
    engine.is_stuck = True
    async with in_process(engine) as client:
        task = asyncio.ensure_future(ask(client, stream=True, max_tokens=2))
        await until_async(lambda: engine.num_held == 1)
        await asyncio.sleep(0.2)
        engine.is_stuck = False
        text = (await task).text
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


async def test_bug_in_a_writer_ends_the_stream_with_an_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(streams.CompletionWriter, "on_event", broken)
    async with in_process(engine) as client:
        error, done = last_events(await ask(client, stream=True))
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    await until_async(lambda: engine.num_held == 0)


async def test_events_of_a_slow_consumer_are_joined() -> None:
    call = Call([Request("a", (1,)), Request("b", (1,))], None, lambda _: None)
    num = 3 * MAX_PENDING_EVENTS
    for i in range(num):
        call.push(TokenEvent("ab"[i % 2], (i,), str(i % 10)))
    call.push(TokenEvent("a", finish_reason=FinishReason.STOP))
    call.push(TokenEvent("b", finish_reason=FinishReason.LENGTH))
    batches = [batch async for batch in call.batches()]
    assert len(batches) == 1
    assert len(batches[0]) <= MAX_PENDING_EVENTS + 3
    tokens = [token for index, event in batches[0] if index == 0 for token in event.token_ids]
    assert tokens == list(range(0, num, 2))


async def test_a_call_whose_client_reads_far_too_slowly_is_ended() -> None:
    closed: list[Call] = []
    call = Call([Request("a", (1,))], None, closed.append)
    for _ in range(3):
        call.push(TokenEvent("a", (1,) * 6000))
    assert closed == [call]
    with pytest.raises(EngineFault, match="too slowly"):
        _ = [batch async for batch in call.batches()]


async def test_probes_stay_quick_under_load() -> None:
    engine = FakeEngine(step_s=0.001, max_rows=8)
    async with in_process(engine) as client:
        tasks = [asyncio.ensure_future(ask(client, max_tokens=200)) for _ in range(40)]
        await until_async(lambda: engine.num_held >= 32)
        start, start_s = time.thread_time(), time.monotonic()  # processor time of the event loop
        assert (await client.get("/health/live")).status_code == 200
        assert time.thread_time() - start < 0.5
        assert time.monotonic() - start_s < PATIENCE_S / 2  # nor did it wait for what does not come
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    engine.shutdown()


def test_everybody_reads_which_host_is_gone_and_nobody_reads_what_it_said() -> None:
    hosts = (
        HostStatus(0, "10.0.0.1:9801", "up", detail="secret"),
        HostStatus(1, "10.0.0.2:40112", "gone", 1.0, "it has failed", "secret"),
    )
    lost = FakeEngine().snapshot()
    text = service_module._failure(replace(lost, hosts=hosts, error="secret"))
    assert text == "The engine has failed: host 1 of 2 (10.0.0.2:40112) is gone: it has failed."
    assert service_module._failure(replace(lost, hosts=hosts[:1], error="secret")) == "The engine has failed."
