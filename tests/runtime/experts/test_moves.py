"""Orders of moves: every placement on the way is valid, the end is the relabelled target, little is moved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.moves import plan_moves, relabel
from runtime.experts.placement import ExpertPlacement, Move, apply


@st.composite
def placement_pairs(draw):
    """Two random placements of one shape, with and without spare slots."""
    devices, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    fewest = -(-experts // devices)
    slots = draw(st.integers(fewest, min(experts, fewest + 2)))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return tuple(
        ExpertPlacement(
            np.stack([random_row(rng, experts, devices, slots) for _ in range(layers)]), devices, experts
        )
        for _ in range(2)
    )


def random_row(rng: np.random.Generator, experts: int, devices: int, slots: int) -> np.ndarray:
    """One layer: each expert on a device with room, the rest filled with experts that the device has not."""
    held: list[list[int]] = [[] for _ in range(devices)]
    for expert in rng.permutation(experts):
        room = [device for device in held if len(device) < slots]
        room[rng.integers(len(room))].append(int(expert))
    for device in held:
        others = [expert for expert in rng.permutation(experts) if expert not in device]
        device.extend(int(expert) for expert in others[: slots - len(device)])
    return np.array([rng.permutation(device) for device in held]).ravel()


@given(placement_pairs())
def test_every_placement_on_the_way_is_valid_and_the_end_is_the_target(pair):
    before, after = pair
    placement = before
    for move in plan_moves(before, after):
        placement = apply(placement, move)  # checks itself
    assert placement == relabel(before, after)


@given(placement_pairs())
def test_relabelled_devices_hold_what_some_device_of_the_target_holds(pair):
    before, after = pair
    for old, new in zip(after.device_experts, relabel(before, after).device_experts, strict=True):
        assert sorted(map(sorted, old.tolist())) == sorted(map(sorted, new.tolist()))


@given(placement_pairs())
def test_exchanges_only_where_nothing_is_spare(pair):
    before, after = pair
    moves = plan_moves(before, after)
    if any(move.is_exchange for move in moves):
        # With one device more than the two that a ring joins, a spare slot is always within reach.
        assert before.num_slots == before.num_experts or before.num_devices < 3 or before.slots_per_device > 1
    changed = np.sum(before.slot_experts != relabel(before, after).slot_experts)
    assert len(moves) <= 2 * changed


def test_renamed_slots_and_devices_cost_nothing():
    before = ExpertPlacement.uniform(3, 12, 4, 4)
    rng = np.random.default_rng(0)
    shuffled = before.device_experts[:, rng.permutation(4)][:, :, rng.permutation(4)].reshape(3, -1)
    assert plan_moves(before, ExpertPlacement(shuffled, 4, 12)) == ()


def test_nodes_keep_their_devices_together():
    before = ExpertPlacement(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), 4, 8)
    swapped = ExpertPlacement(
        np.array([[4, 5, 6, 7, 2, 3, 0, 1]]), 4, 8
    )  # nodes and one node's devices renamed
    assert plan_moves(before, swapped, num_nodes=2) == ()
    across = ExpertPlacement(np.array([[0, 1, 4, 5, 2, 3, 6, 7]]), 4, 8)
    assert plan_moves(before, across) == ()
    assert len(plan_moves(before, across, num_nodes=2)) == 2


def test_a_ring_turns_by_way_of_a_spare_slot():
    before = ExpertPlacement(np.array([[0, 3, 1, 4, 2, 3]]), 3, 5)
    after = ExpertPlacement(np.array([[1, 3, 0, 4, 2, 3]]), 3, 5)
    assert plan_moves(
        before, after
    ) == (  # expert 0 waits in slot 5, on the device that is no part of the ring
        Move(0, 5, 0, 0),
        Move(0, 0, 1, 2),
        Move(0, 2, 0, 5),
        Move(0, 5, 3, 1),
    )


def test_a_ring_without_a_spare_slot_is_exchanged():
    before = ExpertPlacement(np.array([[0, 1, 2, 3, 4, 5]]), 3, 6)
    after = ExpertPlacement(np.array([[0, 3, 2, 5, 4, 1]]), 3, 6)
    moves = plan_moves(before, after)
    assert len(moves) == 2
    assert all(move.is_exchange for move in moves)


def test_a_copy_is_read_from_the_same_node_where_there_is_one():
    before = ExpertPlacement(np.array([[0, 1, 2, 3, 0, 2, 3, 1]]), 4, 4)
    after = ExpertPlacement(np.array([[0, 1, 2, 3, 0, 2, 0, 1]]), 4, 4)
    assert plan_moves(before, after, num_nodes=2) == (Move(0, 6, 0, 4),)


def test_placements_of_different_shape_are_refused():
    with pytest.raises(ValueError, match="placements differ"):
        plan_moves(ExpertPlacement.uniform(1, 8, 2, 4), ExpertPlacement.uniform(1, 8, 4, 2))
    with pytest.raises(ValueError, match="num_nodes 3 does not divide 4"):
        plan_moves(ExpertPlacement.uniform(1, 8, 4, 2), ExpertPlacement.uniform(1, 8, 4, 2), num_nodes=3)
