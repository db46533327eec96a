"""Trials: percentiles of differences, and verdicts that an operator would give."""

import random

import pytest

from control_plane.canary import (
    CanarySpec,
    Measured,
    Outcome,
    Sample,
    SampleRing,
    Trial,
    judge,
    measure,
    worse_percent,
)
from control_plane.percentiles import percentile
from runtime.engine.stats import ITL_BOUNDS_S, Histogram

METRICS = ("itl_p99", "ttft_p99", "e2e_p99", "queue_p99")


def at(time_s: float, histogram: Histogram, tokens: int = 0, finished: int = 0) -> Sample:
    frozen = (histogram.bounds, tuple(histogram.counts))
    return Sample(time_s, dict.fromkeys(METRICS, frozen), tokens, finished)


def of(*values: float, times: int = 1) -> Histogram:
    found = Histogram(ITL_BOUNDS_S)
    for value in values:
        found.observe(value, times)
    return found


def trial(before_s: float = 0.06, **spec: float) -> Trial:
    asked = CanarySpec(60.0, "itl_p99", **spec)
    return Trial(7, asked, Measured(before_s, 100, 60.0), at(100.0, of()))


def test_percentile_lies_in_the_right_bucket() -> None:
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.uniform(0, 0.9) for _ in range(200)]
        found = percentile(ITL_BOUNDS_S, of(*values).counts, 0.99)
        exact = sorted(values)[197]
        bound = next(b for b in ITL_BOUNDS_S if b >= exact)
        below = max((b for b in ITL_BOUNDS_S if b < exact), default=0.0)
        assert below <= found <= bound


def test_only_the_difference_counts() -> None:
    old = of(5.0, times=1000)
    new = old.copy()
    new.observe(0.02, 10)
    found = measure("itl_p99", at(0, old), at(10, new))
    assert (found.num_seen, found.span_s) == (10, 10)
    assert 0.01 <= found.value <= 0.025
    assert measure("itl_p99", None, at(0, old)) == Measured(None, 0, 0.0)


def test_throughput_is_worse_when_lower() -> None:
    before = measure("throughput", at(0, of(), 0, 0), at(10, of(), 1000, 50))
    since = measure("throughput", at(10, of(), 1000, 50), at(20, of(), 1500, 80))
    assert (before.value, since.value, since.num_seen) == (100.0, 50.0, 30)
    assert worse_percent("throughput", before, since) == pytest.approx(50.0)
    assert worse_percent("itl_p99", before, since) == pytest.approx(-50.0)
    assert worse_percent("itl_p99", before, Measured(None, 0, 1.0)) is None


@pytest.mark.parametrize(
    ("since_s", "num", "now_s", "outcome"),
    [
        (0.049, 100, 130.0, Outcome.RUNNING),
        (0.049, 100, 160.0, Outcome.ACCEPTED),
        (0.001, 100, 160.0, Outcome.ACCEPTED),  # better is never a reason to go back
        (0.07, 100, 130.0, Outcome.RUNNING),  # worse, and it may still recover
        (0.07, 100, 160.0, Outcome.REVERTED),
        (5.0, 100, 101.0, Outcome.REVERTED),  # far worse: at once
        (5.0, 29, 101.0, Outcome.RUNNING),  # too few to say
        (0.049, 29, 160.0, Outcome.EXTENDED),
        (0.049, 0, 160.0, Outcome.EXTENDED),
    ],
)
def test_verdicts(since_s: float, num: int, now_s: float, outcome: Outcome) -> None:
    verdict = judge(trial(), at(now_s, of(since_s, times=num)))
    assert verdict.outcome is outcome
    if outcome in (Outcome.ACCEPTED, Outcome.REVERTED):
        assert "itl_p99 was 0.06 s" in verdict.reason
        assert "allowed 20 %" in verdict.reason


def test_an_extended_trial_is_judged_or_taken_back() -> None:
    extended = Trial(7, trial().spec, trial().before, trial().start, is_extended=True)
    assert judge(extended, at(200.0, of(0.04, times=10))).outcome is Outcome.RUNNING
    assert judge(extended, at(220.0, of(0.04, times=10))).outcome is Outcome.REVERTED
    assert judge(extended, at(220.0, of(0.04, times=30))).outcome is Outcome.ACCEPTED


def test_a_trial_whose_rungs_compile_has_not_begun() -> None:
    waiting = Trial(7, trial().spec, trial().before, None)
    assert waiting.end_s is None
    assert judge(waiting, at(1e9, of(5.0, times=100))).outcome is Outcome.RUNNING


def test_the_ring_keeps_ten_minutes_of_seconds() -> None:
    ring = SampleRing()
    for i in range(4 * 1000):
        ring.add(at(i / 4, of()))
    assert ring.since(0.0).time_s == 999 - 600
    assert ring.since(990.5).time_s == 991
    assert ring.since(2000.0) is None
