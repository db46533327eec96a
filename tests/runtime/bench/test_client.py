import pytest

from runtime.bench.client import EngineClient, RequestTimes
from runtime.bench.workload import greedy_request
from tests.runtime.bench.fake_loop import FakeLoop


def test_every_token_of_every_request_is_noted() -> None:
    loop = FakeLoop()
    client = EngineClient(loop)
    client.submit(greedy_request(f"r{i}", (1, 2, 3), 5 + i) for i in range(12))
    client.wait(timeout_s=20)
    loop.stop()
    times = client.take()
    assert [times[f"r{i}"].num_tokens for i in range(12)] == [5 + i for i in range(12)]
    assert all(t.is_ok and len(t.gaps_s) == t.num_tokens - 1 for t in times.values())
    assert client.take() == {}


def test_a_refused_request_is_an_error_and_not_a_hang() -> None:
    loop = FakeLoop(refuse=["r1"])
    client = EngineClient(loop)
    client.submit([greedy_request("r0", (1,), 2), greedy_request("r1", (1,), 2)])
    client.wait(timeout_s=20)
    loop.stop()
    times = client.take()
    assert times["r0"].is_ok
    assert times["r1"].error == "rate_limit_exceeded: no room"
    assert times["r1"].ttft_s is None


def test_waiting_ends_when_the_engine_fails() -> None:
    loop = FakeLoop(fail_after=2)
    client = EngineClient(loop)
    client.submit([greedy_request("r", (1,), 10)])
    with pytest.raises(RuntimeError, match="broken on purpose"):
        client.wait(timeout_s=20)
    loop.stop()


def test_latencies_count_from_arrival_and_by_event() -> None:
    times = RequestTimes(prompt_len=4, arrival_s=10.0, event_s=[12.0, 12.5, 14.0], event_tokens=[1, 4, 2])
    assert times.ttft_s == 2.0
    assert times.gaps_s == [0.5, 1.5]
    assert times.tpot_s == pytest.approx(2.0 / 6)


def test_a_single_token_has_no_time_between_tokens() -> None:
    times = RequestTimes(prompt_len=4, arrival_s=0.0, event_s=[1.0], event_tokens=[1])
    assert times.tpot_s is None
