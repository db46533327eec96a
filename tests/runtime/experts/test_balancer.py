"""Placements from loads: the published example, balance, what must hold for any loads, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from runtime.experts.balancer import NODE_SLACK, SlotShape, balance, choose_copies, node_experts
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads, imbalance
from tests.runtime.experts.expert_cases import EPLB_LOADS, EPLB_SLOTS, shapes_and_loads, zipf


def test_no_device_is_heavier_than_in_the_published_example():
    published = ExpertPlacement(np.array(EPLB_SLOTS), 8, 12)
    own = balance(EPLB_LOADS, SlotShape(12, 8, 2, 4, 2))
    by_node = [device_loads(p, EPLB_LOADS).reshape(2, 2, 4).max(axis=2) for p in (own, published)]
    assert (by_node[0] <= by_node[1] + 1e-9).all()
    assert by_node[0].max(axis=1).tolist() == [156, 179.5]


@given(shapes_and_loads())
@settings(deadline=None)
def test_any_loads_give_a_valid_placement(case):
    shape, loads = case
    placement = balance(loads, shape)  # checks: every expert somewhere, no two copies on a device
    assert placement.slots_per_device == shape.slots_per_device
    if shape.is_hierarchical:
        width = shape.num_experts // shape.num_groups
        by_node = placement.slot_experts.reshape(len(loads), shape.num_nodes, -1) // width
        for nodes in by_node:
            groups = [set(node.tolist()) for node in nodes]
            assert sum(map(len, groups)) == shape.num_groups  # no group on two nodes
            assert len(set(map(len, groups))) == 1


@given(shapes_and_loads())
@settings(deadline=None)
def test_copies_minimise_the_highest_load_per_copy(case):
    shape, loads = case
    num_slots, most = shape.num_devices * shape.slots_per_device, shape.num_devices
    copies = choose_copies(loads, num_slots, most)
    assert (copies.sum(axis=1) == num_slots).all()
    assert copies.min() >= 1
    assert copies.max() <= most
    highest = (loads / copies).max(axis=1, keepdims=True)
    # To get below it every expert would need this many copies, which is too many, or more than there are devices.
    needed = np.floor(loads / np.maximum(highest, 1e-300) * (1 + 1e-9)) + 1
    assert ((needed.sum(axis=1) > num_slots) | (needed.max(axis=1) > most) | (highest[:, 0] == 0)).all()


def test_large_skewed_loads_are_near_perfect():
    placement = balance(zipf(58, 256), SlotShape(256, 32, 9))
    assert imbalance(device_loads(placement, zipf(58, 256))).max() < 0.01


def test_one_expert_with_almost_everything_gets_a_copy_on_every_device():
    loads = np.ones((1, 16))
    loads[0, 3] = 1e6
    placement = balance(loads, SlotShape(16, 4, 8))
    assert placement.copies[0, 3] == 4
    assert imbalance(device_loads(placement, loads)).max() < 1e-3


def test_exchanges_only_help():
    loads = zipf(16, 64)
    shape = SlotShape(64, 8, 9)
    tops = [
        device_loads(balance(loads, shape, max_exchanges=rounds), loads).max(axis=1)
        for rounds in (0, 1, 4, 16)
    ]
    for fewer, more in itertools.pairwise(tops):
        assert (more <= fewer + 1e-9).all()
    assert tops[-1].mean() < tops[0].mean()


def test_an_uncertain_expert_gets_the_spare_slots():
    loads = np.full((1, 8), 10.0)
    unsure = np.zeros((1, 8))
    unsure[0, 5] = 30
    shape = SlotShape(8, 4, 3)
    assert balance(loads, shape, uncertainty=unsure).copies[0, 5] == 4
    assert balance(loads, shape).copies[0, 5] < 4


def test_layers_without_load_are_spread_evenly():
    placement = balance(np.zeros((2, 8)), SlotShape(8, 4, 3))
    assert placement.copies.max() == 2


def test_groups_used_together_come_to_one_node_while_it_stays_balanced():
    loads = np.full((1, 8), 10.0)
    affinity = np.zeros((1, 8, 8))
    for one, other in ((0, 1), (2, 7), (3, 4), (5, 6)):
        affinity[0, one, other] = 100  # one direction is enough
    shape = SlotShape(8, 4, 2, num_groups=8, num_nodes=2)
    nodes = node_experts(loads, shape, affinity)[0].tolist()
    for pair in ((0, 1), (2, 7), (3, 4), (5, 6)):
        assert any(set(pair) <= set(node) for node in nodes)
    skewed = loads * np.array([5, 5, 1, 1, 1, 1, 1, 1])  # together 0 and 1 would weigh down a node
    by_node = [skewed[0, node].sum() for node in node_experts(skewed, shape, affinity)[0]]
    assert max(by_node) <= sum(by_node) / 2 * (1 + NODE_SLACK)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 4, 1), "8 experts do not fit 4 x 1 slots"),
        ((8, 2, 9), "slots_per_device 9 is more than the 8 experts"),
        ((8, 4, 5, 4, 2), "slots_per_device 5 is more than the 4 experts"),
        ((8, 4, 2, 3), "num_groups 3 does not divide num_experts 8"),
        ((8, 4, 2, 4, 3), "num_nodes 3 does not divide num_devices 4"),
        ((8, 0, 2), "must be at least 1"),
    ],
)
def test_shapes_that_cannot_hold_the_experts_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        SlotShape(*numbers)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_loads_that_are_no_loads_are_refused(bad):
    loads = np.ones((1, 8))
    loads[0, 0] = bad
    with pytest.raises(ValueError, match="loads must be finite and not negative"):
        balance(loads, SlotShape(8, 4, 3))
    with pytest.raises(ValueError, match=r"loads must be \[layers, 8\], not \[8\]"):
        balance(np.ones(8), SlotShape(8, 4, 3))
    with pytest.raises(ValueError, match="affinity must be finite"):
        balance(np.ones((1, 8)), SlotShape(8, 4, 2, 8, 2), affinity=np.ones((1, 4, 4)))
