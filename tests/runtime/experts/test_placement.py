"""The placement table: what it derives, what it refuses, and single moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.balancer import balance
from runtime.experts.placement import ExpertPlacement, Move, apply
from tests.runtime.experts.expert_cases import shapes_and_loads


def one_layer(*experts: int, devices: int = 2, num_experts: int = 3) -> ExpertPlacement:
    return ExpertPlacement(np.array([experts]), devices, num_experts)


def test_the_example_of_the_docstring():
    placement = one_layer(0, 1, 2, 0)
    assert placement.copies.tolist() == [[2, 1, 1]]
    assert placement.max_copies == 2
    assert placement.expert_slots.tolist() == [[[0, 3], [1, -1], [2, -1]]]
    assert placement.expert_slots.dtype == placement.copies.dtype == placement.slot_experts.dtype == np.int32


def test_the_table_is_a_copy_and_read_only():
    given = np.array([[0, 1, 2, 0]])
    placement = ExpertPlacement(given, 2, 3)
    given[0, 0] = 2
    assert placement.slot_experts[0, 0] == 0
    for array in (placement.slot_experts, placement.copies, placement.expert_slots):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0, 1, 2]], "3 slots do not divide over num_devices 2"),
        ([[0, 1, 1, 0]], "layer 0: expert 2 has no slot"),
        ([[0, 0, 1, 2]], "layer 0: device 0 holds expert 0 in two slots"),
        ([[0, 1, 2, 3]], r"must lie in \[0, 3\), not \[0, 3\]"),
        ([[0, -1, 2, 1]], "must lie in"),
        ([[0.0, 1.0, 2.0, 1.0]], "must be integers"),
        ([0, 1, 2, 0], "must be integers"),
    ],
)
def test_what_cannot_be_served_is_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(np.array(experts), 2, 3)


@pytest.mark.parametrize("devices", [1, 2, 3, 7, 8, 144])
@pytest.mark.parametrize("experts", [1, 2, 7, 64, 256])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_uniform_is_valid_for_any_shape(devices, experts, spare):
    slots = -(-experts // devices) + spare
    if slots > experts:
        with pytest.raises(ValueError, match="slots_per_device must be"):
            ExpertPlacement.uniform(2, experts, devices, slots)
        return
    placement = ExpertPlacement.uniform(2, experts, devices, slots)
    assert placement.slots_per_device == slots
    assert placement.copies.sum() == 2 * devices * slots
    assert placement.copies.max() <= placement.max_copies


def test_uniform_is_balanced_for_even_loads():
    placement = ExpertPlacement.uniform(1, 64, 8, 9)
    load = (1 / placement.copies[0])[placement.device_experts[0]].sum(axis=1)
    np.testing.assert_allclose(load, 8)
    assert ExpertPlacement.uniform(1, 4, 2, 2).slot_experts.tolist() == [[0, 1, 2, 3]]


def test_uniform_says_what_is_too_small():
    with pytest.raises(ValueError, match="num_devices 2 x slots_per_device 3 cannot hold 8 experts"):
        ExpertPlacement.uniform(1, 8, 2, 3)


def test_a_move_replaces_one_slot():
    before = one_layer(0, 1, 2, 0)
    assert apply(before, Move(0, 3, 1, 1)).slot_experts.tolist() == [[0, 1, 2, 1]]
    assert before.slot_experts.tolist() == [[0, 1, 2, 0]]


def test_an_exchange_swaps_two_slots():
    before = one_layer(0, 1, 2, 3, num_experts=4)
    assert apply(before, Move(0, 0, 2, 2, is_exchange=True)).slot_experts.tolist() == [[2, 1, 0, 3]]


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (Move(0, 1, 2, 2), "holds the only copy of expert 1"),
        (Move(0, 3, 1, 0), "from_slot holds expert 0"),
        (Move(0, 3, 2, 2), "device 1 holds expert 2 in two slots"),
    ],
)
def test_a_move_that_breaks_serving_is_refused(move, message):
    with pytest.raises(ValueError, match=message):
        apply(one_layer(0, 1, 2, 0), move)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_none_is_refused(slot):
    for move in (Move(0, slot, 1, 1), Move(0, 3, 0, slot)):
        with pytest.raises(ValueError, match="slots are 0 to 3"):
            apply(one_layer(0, 1, 2, 0), move)


@given(shapes_and_loads(), st.integers(0, 2**32 - 1))
def test_what_a_move_leaves_is_what_the_whole_check_would_let_through(case, seed):
    """A move looks at what it touches only; the check of a whole placement says whether that was enough."""
    shape, loads = case
    placement, rng = balance(loads, shape), np.random.default_rng(seed)
    for _ in range(20):
        layer, is_exchange = int(rng.integers(placement.num_layers)), bool(rng.integers(2))
        to_slot, from_slot = map(int, rng.integers(placement.num_slots, size=2))
        row = placement.slot_experts[layer].copy()
        move = Move(layer, to_slot, int(row[from_slot]), from_slot, is_exchange)
        if is_exchange:
            row[from_slot] = row[to_slot]
        row[to_slot] = move.expert
        is_only = (
            not is_exchange
            and (placement.slot_experts[layer] == placement.slot_experts[layer, to_slot]).sum() < 2
        )
        try:
            wanted = ExpertPlacement(
                np.concatenate([placement.slot_experts[:layer], [row], placement.slot_experts[layer + 1 :]]),
                placement.num_devices,
                placement.num_experts,
            )
        except ValueError:
            wanted = None
        if wanted is None or is_only:
            with pytest.raises(ValueError, match="holds"):
                apply(placement, move)
        else:
            placement = apply(placement, move)
            assert placement == wanted
            np.testing.assert_array_equal(placement.copies, wanted.copies)
            assert not placement.slot_experts.flags.writeable


def test_layers_can_be_taken_out():
    both = ExpertPlacement(np.array([[0, 1, 2, 0], [0, 1, 2, 1]]), 2, 3)
    assert both.only([1]) == one_layer(0, 1, 2, 1)
    assert both.only([1, 0]).slot_experts.tolist() == [[0, 1, 2, 1], [0, 1, 2, 0]]


def test_equality_is_of_the_contents():
    assert one_layer(0, 1, 2, 0) == one_layer(0, 1, 2, 0)
    assert hash(one_layer(0, 1, 2, 0)) == hash(one_layer(0, 1, 2, 0))
    assert one_layer(0, 1, 2, 0) != one_layer(0, 1, 2, 1)
