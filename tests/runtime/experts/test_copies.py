"""The step's table of copies names every slot once, at its expert and device, in one shape whatever the placement."""

import numpy as np
from hypothesis import given

from runtime.experts.balancer import balance
from runtime.experts.copies import copies_table
from runtime.experts.placement import ExpertPlacement
from tests.runtime.experts.expert_cases import shapes_and_loads


def test_a_small_table() -> None:
    """One layer, two devices of three slots; experts 0 and 1 have a copy on each."""
    table = copies_table(ExpertPlacement(np.array([[0, 1, 2, 0, 1, 3]]), 2, 4))
    assert table.tolist() == [[[0, 3], [1, 4], [2, -1], [-1, 5]]]
    assert table.dtype == np.int32


@given(shapes_and_loads())
def test_every_slot_stands_at_its_expert_and_device(case) -> None:
    shape, loads = case
    placement = balance(loads, shape)
    table = copies_table(placement)
    assert table.shape == (placement.num_layers, placement.num_experts, placement.num_devices)
    layer, expert, device = np.nonzero(table >= 0)
    slots = table[layer, expert, device]
    assert (placement.slot_experts[layer, slots] == expert).all()
    assert (slots // placement.slots_per_device == device).all()
    assert len(slots) == placement.slot_experts.size
