"""Shares of copies: they add up, never make it worse, and follow expert_balance_weight."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.balancer import balance
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import (
    device_loads,
    equal_shares,
    imbalance,
    lean_between_experts,
    slot_shares,
)
from tests.runtime.experts.expert_cases import shapes_and_loads

PLACEMENT = ExpertPlacement(np.array([[0, 1, 2, 0]]), 2, 3)  # expert 0 on both devices
LOADS = np.array([[12.0, 6.0, 2.0]])


def test_full_weight_levels_the_devices_and_none_shares_equally():
    assert device_loads(PLACEMENT, LOADS).tolist() == [[12, 8]]
    assert equal_shares(PLACEMENT).tolist() == [[0.5, 1, 1, 0.5]]
    assert slot_shares(PLACEMENT, LOADS, 0).tolist() == [[0.5, 1, 1, 0.5]]
    np.testing.assert_allclose(device_loads(PLACEMENT, LOADS, slot_shares(PLACEMENT, LOADS, 0.5)), 10)
    np.testing.assert_allclose(device_loads(PLACEMENT, LOADS, slot_shares(PLACEMENT, LOADS, 0.25)), [[11, 9]])


@given(shapes_and_loads(), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_shares_add_up_and_never_raise_the_heaviest_device(case, weight, seed):
    shape, loads = case
    placement = balance(np.random.default_rng(seed).permutation(loads.ravel()).reshape(loads.shape), shape)
    shares = slot_shares(placement, loads, weight)
    assert shares.min() >= 0
    np.testing.assert_allclose(placement.by_copy(shares).sum(axis=2), 1, rtol=1e-5)
    equal, leaning = device_loads(placement, loads), device_loads(placement, loads, shares)
    np.testing.assert_allclose(leaning.sum(axis=1), loads.sum(axis=1))
    assert (leaning.max(axis=1) <= equal.max(axis=1) * (1 + 1e-9)).all()


def test_imbalance_of_nothing_is_none():
    assert imbalance(np.array([[0, 0], [3, 1]])).tolist() == [0, 0.5]


def test_leaning_between_experts_goes_away_from_the_busy_device():
    bias = lean_between_experts(PLACEMENT, LOADS, 0.5)
    assert bias[0, 1] < bias[0, 0] < bias[0, 2]
    assert np.abs(bias).max() <= 0.5
    assert not lean_between_experts(PLACEMENT, LOADS, 0).any()


@pytest.mark.parametrize("weight", [-0.1, 0.6, float("nan")])
def test_the_weight_is_bounded(weight):
    with pytest.raises(ValueError, match=r"expert_balance_weight must be in \[0, 0.5\]"):
        slot_shares(PLACEMENT, LOADS, weight)
    with pytest.raises(ValueError, match="expert_lean_between"):
        lean_between_experts(PLACEMENT, LOADS, weight)
