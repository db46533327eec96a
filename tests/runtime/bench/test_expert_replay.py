"""Replay: what a placement is judged on is never what it was made from; shares are of the step they act in."""

import numpy as np

from runtime.bench.expert_loads import read_recorded
from runtime.bench.expert_replay import (
    by_source,
    held_out,
    imbalance_of_steps,
    judge,
    loads_of_steps,
    replay_synthetic,
    steady_traffic,
)
from runtime.experts.balancer import SlotShape
from runtime.experts.placement import ExpertPlacement


def test_a_window_is_never_judged_on_what_its_placement_was_made_from():
    """With windows that have nothing in common a placement of the window before must be bad, the oracle's good."""
    rng = np.random.default_rng(0)
    windows = []
    for turn in range(4):
        counts = np.ones((8, 2, 64), np.int64)
        counts[:, :, rng.permutation(64)[:16]] = 100
        windows.append((f"task {turn}", counts))
    found = judge(windows, 1, SlotShape(64, 8, 9), has_keys=False)
    assert found["last_window"].shape == (3, 2)
    assert found["oracle"].mean() < 0.1
    assert found["last_window"].mean() > 0.3


def test_keys_beat_the_last_window_on_held_out_halves():
    found = held_out(read_recorded(None), 8, 9, block=2)
    assert found["judged_windows"] == 12
    assert found["predicted_with_keys"] < 0.1 < found["predicted"] < found["last_window"]


def test_steady_synthetic_loads():
    found = replay_synthetic(32, 9, num_seeds=1)["policies"]
    assert found["lower_bound"]["mean"] <= found["oracle"]["mean"] < found["true_rates"]["mean"]
    assert found["predicted"]["mean"] < found["last_window"]["mean"] < 0.1


def test_copies_share_in_each_step_by_its_own_rows():
    """Expert 0 is on devices 0 and 1; device 0 also has the 1, device 1 the 2. Which of these is hot changes in step two."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2]]), 2, 3)
    steps = np.array([[[[10, 10, 0]]], [[[10, 0, 10]]]])  # one source: the rows of all are known
    assert loads_of_steps(placement, steps, 0).tolist() == [[[15, 5]], [[5, 15]]]
    leaning = loads_of_steps(placement, steps, 0.5)
    np.testing.assert_allclose(leaning, 10, rtol=0.02)
    # Over both steps equal shares are as even; in each of them they are not.
    assert imbalance_of_steps(loads_of_steps(placement, steps, 0))[0] == 0.5
    assert imbalance_of_steps(leaning)[0] < 0.02


def test_each_source_shares_its_own_rows():
    """Two sources with all their single rows on devices 0 and 1: neither sees what the other has there."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2]]), 2, 3)
    parts = np.array([[[[10, 10, 0]], [[10, 0, 10]]]])  # [steps, sources, L, E]
    assert loads_of_steps(placement, parts, 0.5)[0].sum() == 40
    np.testing.assert_allclose(loads_of_steps(placement, parts, 0.5), 20, rtol=0.02)
    idle = np.array([[[[10, 0, 0]], [[0, 10, 0]]]])
    by_all = loads_of_steps(placement, idle.sum(axis=1, keepdims=True), 0.5)
    np.testing.assert_allclose(by_all, 10, rtol=0.02)
    np.testing.assert_allclose(loads_of_steps(placement, idle, 0.5), [[[15, 5]]])


def test_the_parts_of_the_sources_are_the_step():
    steps = np.random.default_rng(0).integers(0, 50, (3, 2, 5))
    parts = by_source(steps, 4, np.random.default_rng(1))
    assert parts.shape == (3, 4, 2, 5)
    np.testing.assert_array_equal(parts.sum(axis=1), steps)


def test_traffic_seen_is_not_the_traffic_judged():
    one, again, other = steady_traffic(3), steady_traffic(3), steady_traffic(4)
    np.testing.assert_array_equal(one.window, again.window)
    assert (one.window != one.last).any()
    assert (one.window != other.window).any()
    error, noise = (
        np.abs(x / x.sum(axis=1, keepdims=True) - one.rates).sum() for x in (one.prediction.loads, one.last)
    )
    assert error < noise  # eight windows tell more than one
