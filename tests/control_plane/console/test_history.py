"""Rings: nothing is lost by joining but detail, and nothing grows."""

from dataclasses import replace

import numpy as np
import pytest

from control_plane.console.history import EXPERT_POINTS, SPAN_S, STEP_S, TICK_S, History
from control_plane.console.lines import Lines
from control_plane.console.parts import imbalance
from runtime.engine.stats import EngineSnapshot, Histogram, PhaseTotals, PromiseTotals
from runtime.schedule.policy import SchedulePolicy
from tests.control_plane.ladders import snapshot_of

START_S = 1_800_000_000.0
QUIET = snapshot_of(policy=SchedulePolicy(batch_size=8, micro_batch_size=4))


def at(tokens: int, running: int = 0, **facts: object) -> EngineSnapshot:
    return replace(QUIET, generation_tokens=tokens, num_running=running, **facts)


def test_a_day_of_samples_stays_within_its_bounds_and_adds_up_in_every_ring() -> None:
    history, period_s = History(), 10.0
    num = int(1.1 * SPAN_S["24h"] / period_s)
    for i in range(num):
        history.add(at(50 * i, running=i % 5, expert_tokens=((i, 3 * i),)), START_S + period_s * i)
    now_s = START_S + period_s * (num - 1)
    for span, seconds in SPAN_S.items():
        lines = Lines(history.points(span, now_s))
        assert len(lines.times) <= seconds / STEP_S[span] + 1 <= 500
        assert lines.seconds == pytest.approx(seconds, abs=2 * max(period_s, STEP_S[span]))
        assert lines.per_second("generation_tokens") == 5.0
        assert np.allclose(lines.rate("generation_tokens", "tokens/s")["values"], 5.0)
        gauge = lines.gauge("running", "requests")
        if STEP_S[span] > period_s:
            assert (gauge["low"].min(), gauge["high"].max()) == (0, 4)
            assert np.allclose(gauge["values"][1:-1], 2.0, atol=1.01)
        experts = history.experts(span, now_s)
        assert len(experts) <= EXPERT_POINTS + 1
        first, last = experts[0], experts[-1]
        assert (last.tokens - first.tokens).tolist() == [
            [
                round((last.time_s - first.time_s) / period_s),
                3 * round((last.time_s - first.time_s) / period_s),
            ]
        ]


def test_a_span_begins_with_the_last_point_before_it() -> None:
    history = History()
    for i in range(20):
        history.add(at(i), START_S + TICK_S * i)
    points = history.points("15min", START_S + 900.0 + 11.0)
    assert points[0].time_s == START_S + 10.0  # the last one before the window: its first interval is whole
    assert history.points("15min", START_S + 90_000.0)[0].time_s == START_S + 38.0


def test_one_point_or_none_says_nothing() -> None:
    assert Lines(()).gained("generation_tokens") == 0
    assert Lines(()).percentile("ttft", 0.99) is None
    history = History()
    history.add(at(5), START_S)
    lines = Lines(history.points("15min", START_S))
    assert (len(lines.times), lines.per_second("generation_tokens")) == (0, None)
    assert len(lines.quantile("ttft_p99", "ttft", 0.99)["values"]) == 0
    assert lines.rungs()[QUIET.rungs[0].name].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("back_s", "num_points", "gained"), [(1.5, 3, 4), (3600.0, 3, 2)])
def test_a_clock_that_was_set_back_does_no_harm(back_s: float, num_points: int, gained: int) -> None:
    history = History()
    times = (0.0, 2.0, 2.0 - back_s, 3.9 - back_s, 6.0 - back_s)
    for i, time_s in enumerate(times):
        history.add(at(i), START_S + time_s)
    points = history.points("15min", START_S - 3600)
    assert [p.time_s for p in points] == sorted({p.time_s for p in points})
    assert (len(points), Lines(points).gained("generation_tokens")) == (num_points, gained)


def test_percentiles_are_of_the_interval_and_null_where_nothing_was_seen() -> None:
    history, seen = History(), Histogram((0.1, 1.0, 10.0))
    for i in range(4):
        if i == 2:
            seen = seen.copy()
            seen.observe(5.0, 100)
        history.add(at(0, ttft_s=seen), START_S + TICK_S * i)
    lines = Lines(history.points("15min", START_S + 6))
    values = lines.quantile("ttft_p50", "ttft", 0.5)["values"]
    assert np.isnan(values).tolist() == [True, False, True]
    assert values[1] == pytest.approx(5.5)
    assert lines.percentile("ttft", 0.5) == pytest.approx(5.5)


def test_rungs_come_and_go_with_the_ladder() -> None:
    history = History()
    one, two = QUIET.rungs[:2]
    steps = [
        (one,),
        (replace(one, hits=4),),
        (replace(one, hits=5), replace(two, hits=1)),
        (replace(two, hits=3),),
    ]
    for i, rungs in enumerate(steps):
        history.add(at(0, rungs=rungs), START_S + TICK_S * i)
    lines = Lines(history.points("15min", START_S + 6))
    assert {name: row[0] for name, row in lines.rungs().items()} == {two.name: 3}
    plots = {plot["label"]: plot["values"] for plot in lines.rung_hits([one.name, two.name])}
    assert np.array_equal(plots[one.name], [2.0, 0.5, np.nan], equal_nan=True)
    assert np.array_equal(plots[two.name], [np.nan, np.nan, 1.0], equal_nan=True)


def test_phases_and_promises_reach_the_totals() -> None:
    history = History()
    history.add(at(0), START_S)
    phases = {"prefill": PhaseTotals(60, 80, 1.0), "decode": PhaseTotals(3, 4, 0.5)}
    history.add(at(0, phases=phases, promises=PromiseTotals(8, 6, 2, 1)), START_S + TICK_S)
    lines = Lines(history.points("15min", START_S + 2))
    assert lines.quotient("prefill_real", "prefill_computed") == 0.75
    assert lines.quotient("kept", "requests") == 0.75
    assert lines.gained("itl_missed") == 1


def test_imbalance_is_over_experts_of_a_layer() -> None:
    found = imbalance(np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    assert np.array_equal(found, [4.0, 1.0, np.nan], equal_nan=True)
