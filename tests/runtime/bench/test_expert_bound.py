"""The bound is below every placement that was found, and tight where that is known; the gain is arithmetic."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bench.expert_bound import PAIR_TOLERANCE, critical_path_gain, lowest_pair, lowest_top
from runtime.bench.expert_loads import draw, zipf_rates
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads


def best_of_all(loads, num_devices, slots_per_device):
    """The lightest heaviest device over every placement there is."""
    best = np.inf
    tables = itertools.combinations(range(loads.shape[1]), slots_per_device)
    for table in itertools.combinations_with_replacement(tables, num_devices):
        if set(itertools.chain(*table)) == set(range(loads.shape[1])):
            placement = ExpertPlacement(np.array(table).reshape(1, -1), num_devices, loads.shape[1])
            best = min(best, device_loads(placement, loads).max())
    return best


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 3, 2), (5, 3, 2), (5, 4, 2), (4, 2, 3)]))
@settings(deadline=None, max_examples=40)
def test_no_placement_is_below_the_bound(seed, shape):
    num_experts, num_devices, slots = shape
    loads = np.random.default_rng(seed).random((1, num_experts)) ** 4
    bound, best = lowest_top(loads, num_devices, slots)[0], best_of_all(loads, num_devices, slots)
    assert bound <= best * (1 + 1e-9)
    assert device_loads(balance(loads, SlotShape(*shape)), loads).max() >= best * (1 - 1e-9)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 3, 2), (5, 3, 2), (5, 4, 2)]))
@settings(deadline=None, max_examples=20)
def test_the_bound_for_pairs_is_closer_and_still_below_every_placement(seed, shape):
    num_experts, num_devices, slots = shape
    loads = np.random.default_rng(seed).random((1, num_experts)) ** 4
    low, best = lowest_top(loads, num_devices, slots)[0], best_of_all(loads, num_devices, slots)
    assert low <= lowest_pair(loads, num_devices)[0] <= best * (1 + PAIR_TOLERANCE)


def test_the_bound_for_pairs_counts_the_light_partners():
    """Three copies of the hot expert need three partners, of which only one can be the 2."""
    loads = np.array([[90.0, 2, 5, 5, 5, 5]])
    assert lowest_top(loads, 4, 2)[0] == pytest.approx(32)
    assert lowest_pair(loads, 4)[0] == pytest.approx(33.9, rel=0.01)  # up to PAIR_RANGE above 32


def test_the_bound_for_pairs_is_nearly_reached_on_many_devices():
    loads = draw(np.random.default_rng(0), zipf_rates(np.random.default_rng(0))[:4], 16384).astype(float)
    top = device_loads(balance(loads, SlotShape(256, 144, 2)), loads).max(axis=1)
    bound = lowest_pair(loads, 144)
    assert (bound <= top).all()
    assert (top / bound).mean() < 1.005


def test_the_bound_knows_that_a_hot_copy_is_not_alone():
    loads = np.array([[100.0, 8, 8, 8, 8, 8]])
    assert lowest_top(loads, 4, 2)[0] == pytest.approx(100 / 3 + 8)  # two spare slots: three copies


def test_the_gain_of_the_critical_path():
    without, with_ = np.array([[8, 0], [8, 0]]), np.array([[8, 0], [4, 4]])
    found = critical_path_gain(without, with_, 1e-3)
    assert found["critical_path_gain"] == pytest.approx(16 / 12, abs=1e-3)
    assert found["bound"] == 2
    assert found["part_of_bound"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["without_s"] == pytest.approx(0.016)
    assert found["label"].startswith("modelled")


@pytest.mark.parametrize(
    ("without", "with_", "row_s", "message"),
    [
        (np.ones((2, 2)), np.ones((2, 2)), 0, "row_s"),
        (np.ones(2), np.ones((2, 2)), 1e-3, "rows_without must be"),
        (np.ones((2, 2)), np.full((2, 2), np.nan), 1e-3, "rows_with must be"),
        (np.ones((2, 2)), np.ones((3, 2)), 1e-3, "the same work"),
        (np.zeros((2, 2)), np.zeros((2, 2)), 1e-3, "no rows"),
    ],
)
def test_what_is_not_comparable_is_refused(without, with_, row_s, message):
    with pytest.raises(ValueError, match=message):
        critical_path_gain(without, with_, row_s)
