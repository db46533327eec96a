"""The step's table of copies names every slot once, under its expert, in one shape whatever the placement."""

import numpy as np
from hypothesis import given

from runtime.experts.balancer import balance
from runtime.experts.copies import copies_table, table_len
from runtime.experts.placement import ExpertPlacement
from tests.runtime.experts.expert_cases import shapes_and_loads


def test_a_small_table() -> None:
    """One layer, two devices of three slots; experts 0 and 1 have a copy on each."""
    table = copies_table(ExpertPlacement(np.array([[0, 1, 2, 0, 1, 3]]), 2, 4))
    assert table.tolist() == [[0, 3, 1, 4, 2, -1, 5, -1, 0, 2, 4, 1, 3, 6]]
    assert table.dtype == np.int32


@given(shapes_and_loads())
def test_every_slot_stands_under_its_expert(case) -> None:
    shape, loads = case
    placement = balance(loads, shape)
    table = copies_table(placement)
    assert table.shape[1] == table_len(placement.num_experts, placement.num_slots, placement.max_copies)
    slots, place_of_slot = np.split(table, [-placement.num_slots], axis=1)
    named = np.take_along_axis(slots, place_of_slot, axis=1)
    assert (named == np.arange(placement.num_slots)).all()
    assert (place_of_slot // placement.max_copies == placement.slot_experts).all()
    assert (slots >= 0).sum() == placement.slot_experts.size
