import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.paired import (
    abba_order,
    bootstrap_median,
    chance_swing,
    paired_ratios,
    window_p99,
    window_swing,
)

figures = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=12)


def test_abba_turns_round_and_counts_everyone_once_a_round() -> None:
    assert abba_order(("a", "b"), 3) == [("a", "b"), ("b", "a"), ("a", "b")]
    assert abba_order(("s", "f", "d"), 2) == [("s", "f", "d"), ("d", "f", "s")]


def test_a_steady_drift_cancels_in_abba_order() -> None:
    """Each run is 10 % slower than the one before; both sides are in truth equally fast."""
    speeds: dict[str, list[float]] = {"a": [], "b": []}
    speed = 1.0
    for names in abba_order(("a", "b"), 4):
        for name in names:
            speeds[name].append(speed)
            speed *= 0.9
    ratios = paired_ratios(speeds["a"], speeds["b"])
    assert ratios == pytest.approx([1 / 0.9, 0.9, 1 / 0.9, 0.9])
    assert np.exp(np.mean(np.log(ratios))) == pytest.approx(1.0)


def test_ratios_are_ours_over_the_other_and_pair_by_pair() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="2 and 1 figures"):
        paired_ratios([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above zero"):
        paired_ratios([1.0], [0.0])


@given(figures)
def test_the_interval_holds_the_median_and_stays_within_the_data(values: list[float]) -> None:
    found = bootstrap_median(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found.median == pytest.approx(float(np.median(values)))
    assert found == bootstrap_median(values)  # the same every time


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    intervals = [bootstrap_median(rng.normal(1.0, 0.1, 15).tolist(), seed) for seed in range(120)]
    covered = sum(i.low <= 1.0 <= i.high for i in intervals) / len(intervals)
    assert 0.85 <= covered <= 1.0


def test_windows_are_whole_and_the_swing_is_from_their_median() -> None:
    assert window_p99([1.0] * 10 + [2.0] * 10 + [9.0] * 5, 10) == [1.0, 2.0]
    assert window_swing([1.0, 1.0, 1.3]) == pytest.approx(0.3)
    assert window_swing([1.0]) is None


def test_chance_swing_tells_a_drift_from_noise() -> None:
    rng = np.random.default_rng(0)
    steady = rng.exponential(1.0, 2000)
    drifting = steady * np.repeat([1.0, 1.0, 3.0, 3.0], 500)
    swing = window_swing(window_p99(drifting.tolist(), 500))
    by_chance = chance_swing(drifting.tolist(), 500)
    assert swing is not None
    assert by_chance is not None
    assert swing > 2 * by_chance
