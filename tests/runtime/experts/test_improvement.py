"""Few moves to a better placement: each is worth its price, nothing gets worse, and a shift is repaired."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.balancer import SlotShape, balance
from runtime.experts.improvement import improve
from runtime.experts.moves import plan_moves
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads, imbalance, slot_shares
from tests.runtime.experts.expert_cases import shapes_and_loads, zipf


def top(placement, loads, weight):
    return device_loads(placement, loads, slot_shares(placement, loads, weight)).max(axis=1)


@given(shapes_and_loads(), st.integers(0, 2**32 - 1), st.integers(0, 6), st.sampled_from([0.0, 0.05]))
@settings(deadline=None)
def test_any_start_gets_no_worse_and_every_move_pays(case, seed, rounds, price):
    shape, loads = case
    start = balance(np.random.default_rng(seed).permutation(loads.ravel()).reshape(loads.shape), shape)
    nodes = shape.num_nodes if shape.is_hierarchical else 1
    found = improve(start, loads, min_saving=price, max_rounds=rounds, num_nodes=nodes)
    assert (found.num_moves == 0).all() or rounds > 0
    saved = top(start, loads, 0) - top(found.placement, loads, 0)
    np.testing.assert_allclose(saved, found.saved, atol=1e-9)
    assert (saved >= price * found.num_moves - 1e-9).all()
    experts_of_node = [
        [set(node.tolist()) for node in layer.reshape(nodes, -1)] for layer in start.slot_experts
    ]
    for layer, row in enumerate(found.placement.slot_experts):
        assert [set(node.tolist()) for node in row.reshape(nodes, -1)] == experts_of_node[layer]


def test_a_spare_slot_takes_a_copy_of_the_new_hot_expert_in_one_move():
    # Expert 0 has a copy on device 2 that it no longer needs; expert 3 on device 1 is hot.
    start = ExpertPlacement(np.array([[0, 1, 3, 2, 4, 0]]), 3, 5)
    loads = np.array([[4.0, 5, 2, 20, 4]])
    found = improve(start, loads, max_rounds=1)
    assert found.placement.slot_experts.tolist() == [[0, 1, 3, 2, 4, 3]]
    assert found.num_moves.tolist() == [1]
    assert found.saved.tolist() == [22 - 14]
    assert len(plan_moves(start, found.placement)) == 1


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_shift_is_repaired_in_a_fraction_of_the_moves_of_a_new_placement(weight):
    rng = np.random.default_rng(1)
    before = zipf(8, 64, seed=1)
    after = before * rng.uniform(0.95, 1.05, before.shape)
    for layer in after:
        changed = rng.choice(64, 16, replace=False)
        layer[changed] = np.roll(layer[changed], 1)
    shape = SlotShape(64, 8, 9)
    start = balance(before, shape)
    found = improve(start, after, balance_weight=weight, max_rounds=4)
    shares = slot_shares(found.placement, after, weight)
    assert imbalance(device_loads(start, after)).mean() > 0.15
    assert imbalance(device_loads(found.placement, after, shares)).mean() < 0.06
    moves = plan_moves(start, found.placement)
    assert len(moves) < 0.25 * len(plan_moves(start, balance(after, shape)))


def test_a_price_too_high_moves_nothing():
    start = ExpertPlacement.uniform(2, 16, 4, 5)
    found = improve(start, zipf(2, 16), min_saving=np.array([np.inf, 0]), max_rounds=4)
    assert found.num_moves[0] == 0
    assert found.num_moves[1] > 0
    assert np.array_equal(found.placement.slot_experts[0], start.slot_experts[0])


def test_one_device_has_nothing_to_move():
    start = ExpertPlacement.uniform(1, 4, 1, 4)
    assert improve(start, np.ones((1, 4))).placement == start
    with pytest.raises(ValueError, match=r"loads must be \[1, 4\]"):
        improve(start, np.ones((2, 4)))


def test_layers_with_several_equally_heavy_devices_are_not_given_up():
    """One change relieves one device; the layer is lighter only when all three have been relieved."""
    start = ExpertPlacement.uniform(1, 24, 6, 4)
    loads = np.ones((1, 24))
    loads[0, [0, 1, 4, 5, 8, 9]] = 9  # two hot experts on each of devices 0, 1, 2
    found = improve(start, loads, max_rounds=1)
    assert device_loads(start, loads).max() == 20
    assert device_loads(found.placement, loads).max() == 12
