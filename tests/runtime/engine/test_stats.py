"""Histograms count like Prometheus ones; the drain rate looks at the last minute only."""

import numpy as np

from runtime.engine.stats import MAX_UNADDED, EngineStats, Histogram, PhaseTotals, PromiseTotals


def test_histogram_bounds_are_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 12.0
    copy = histogram.copy()
    histogram.observe(1.0, times=3)
    assert (copy.count, histogram.count) == (4, 7)


def test_steps_and_experts_add_up():
    stats = EngineStats(clock=lambda: 5.0)
    stats.on_step("decode-8", 6, 8, 0.25)
    stats.on_step("decode-8", 5, 8, 0.75)
    assert (stats.rungs["decode-8"].hits, stats.rungs["decode-8"].real_tokens) == (2, 11)
    assert (stats.busy_s, stats.num_steps) == (1.0, 2)
    stats.on_experts(np.array([[2**31 - 1, 1]], np.int32))
    stats.on_experts(np.array([[5, 1]], np.int32))
    assert stats.expert_tokens is not None
    assert stats.expert_tokens.tolist() == [[2**31 + 4, 2]]


def test_no_launch_of_experts_is_lost_or_counted_twice_however_many_wait():
    """Looks fall before, at and after the number at which they are added up unasked."""
    stats, total = EngineStats(clock=lambda: 5.0), np.zeros((2, 3), np.int64)
    assert stats.expert_tokens is None
    looks = {1, MAX_UNADDED - 1, MAX_UNADDED, MAX_UNADDED + 1, 300, 300 + MAX_UNADDED}
    for num in range(1, 900):
        tokens = np.arange(num, num + 6, dtype=np.int32).reshape(2, 3)
        total += tokens
        stats.on_experts(tokens)
        if num in looks:
            for _ in range(2):
                assert stats.expert_tokens is not None
                assert stats.expert_tokens.tolist() == total.tolist(), num
    assert stats.expert_tokens is not None
    assert stats.expert_tokens.tolist() == total.tolist()


def test_a_step_time_that_is_not_usual_is_busy_time_only():
    stats = EngineStats(clock=lambda: 5.0)
    stats.on_step("decode-8", 6, 8, 0.25)
    stats.on_step("decode-8", 6, 8, 0.75, is_usual=False)
    rung = stats.rungs["decode-8"]
    assert (rung.hits, rung.busy_s, list(rung.step_s)) == (2, 1.0, [0.25])


def test_drain_rate_forgets():
    now = [0.0]
    stats = EngineStats(clock=lambda: now[0])
    stats.on_finish("stop", 50, 50)
    now[0] = 10.0
    stats.on_finish("stop", 50, 50)
    assert stats.drain_rate_tokens_s == 20.0
    now[0] = 100.0
    assert stats.drain_rate_tokens_s == 0.0


def test_phases_and_promises_add_up():
    stats = EngineStats(clock=lambda: 5.0)
    stats.on_phase("decode", 6, 8, 0.25)
    stats.on_phase("decode", 5, 8, 0.75)
    assert stats.phases == {"decode": PhaseTotals(11, 16, 1.0)}
    stats.on_promises(kept_ttft=True, kept_itl=True)
    stats.on_promises(kept_ttft=False, kept_itl=True)
    stats.on_promises(kept_ttft=False, kept_itl=False)
    assert stats.promises == PromiseTotals(num_requests=3, num_kept=1, num_ttft_missed=2, num_itl_missed=1)
