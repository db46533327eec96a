import pytest

from runtime.bench.client import RequestTimes
from runtime.bench.replay import Planned, play_closed, play_open
from runtime.bench.report import progress_bar
from runtime.bench.serving_metrics import keeps_promise, serving_metrics
from runtime.bench.trace import measure, next_scale, show
from runtime.bench.traces import TraceRequest
from runtime.config import SloConfig
from tests.runtime.bench.fake_loop import FakeLoop, fake_engine

SLO = SloConfig.model_validate({"ttft": "2s", "itl": "100ms"})


def test_open_loop_keeps_the_recorded_times_whatever_the_engine_does() -> None:
    loop = FakeLoop(step_s=0.02)
    plans = [Planned(0.5 * i, (1, 2, 3), 4) for i in range(6)]
    with progress_bar() as progress:
        played = play_open(fake_engine(loop), plans, 5.0, "replay", progress)
    loop.stop()
    arrivals = [t.arrival_s - played.times[0].arrival_s for t in played.times]
    assert arrivals == pytest.approx([0.1 * i for i in range(6)])
    assert played.duration_s > 0.5
    assert all(t.ttft_s is not None and t.ttft_s > 0.01 for t in played.times)


def test_metrics_of_a_replay() -> None:
    loop = FakeLoop(step_s=0.002)
    with progress_bar() as progress:
        played = play_closed(fake_engine(loop), [Planned(0.0, (7,) * 48, 4)] * 10, 3, "capacity", progress)
    loop.stop()
    metrics = serving_metrics(played, SLO)
    assert (metrics["requests"], metrics["finished"], metrics["goodput_share"]) == (10, 10, 1.0)
    assert metrics["itl_s"]["n"] == 30
    assert metrics["padding"]["prefill"] == 0.25  # 48 of 64 positions
    decode = next(rung for rung in metrics["rungs"] if rung["phase"] == "decode")
    assert decode["real_tokens"] == 40
    assert decode["computed_tokens"] == 8 * decode["hits"]
    assert metrics["late_compiles"] == 0
    assert 0 < metrics["busy_share"] <= 1


def test_a_promise_needs_both_latencies() -> None:
    def request(ttft_s: float, tpot_s: float) -> RequestTimes:
        return RequestTimes(4, 0.0, [ttft_s, ttft_s + 10 * tpot_s], [1, 10])

    assert keeps_promise(request(1.9, 0.09), SLO)
    assert not keeps_promise(request(2.1, 0.09), SLO)
    assert not keeps_promise(request(1.9, 0.11), SLO)
    assert keeps_promise(RequestTimes(4, 0.0, [1.0], [1]), SLO)
    assert not keeps_promise(RequestTimes(4, 0.0), SLO)


def test_auto_finds_a_scale_that_keeps_the_device_busy_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    loop = FakeLoop(step_s=0.004)
    requests = [TraceRequest(float(i), 10, 5) for i in range(40)]
    result = measure(fake_engine(loop), requests, 1.0, None, 0.6)
    loop.stop()
    assert min(abs(t["busy_share"] - 0.6) for t in result["trials"]) <= 0.15
    assert result["load_of_capacity"] < 1
    show(result | {"trace": "fake.csv"})
    printed = capsys.readouterr().out
    assert "late_compiles=0" in printed
    assert "decode_8" in printed


def test_a_given_scale_is_played_once() -> None:
    loop = FakeLoop()
    result = measure(
        fake_engine(loop), [TraceRequest(0.0, 4, 2), TraceRequest(1.0, 4, 2)], 1.0, 10.0, 0.8, 0, False
    )
    loop.stop()
    assert [t["time_scale"] for t in result["trials"]] == [10.0]
    assert "capacity" not in result


def test_next_scale_goes_between_the_nearest_trials() -> None:
    assert next_scale([(10.0, 0.9)], 0.8) == pytest.approx(10 * 0.8 / 0.9)
    assert next_scale([(10.0, 0.2)], 0.8) == 20.0
    assert next_scale([(10.0, 0.9), (6.0, 0.7)], 0.8) == pytest.approx(8.0)
    assert next_scale([(10.0, 0.9), (8.0, 0.85), (6.0, 0.75)], 0.8) == pytest.approx(7.0)
