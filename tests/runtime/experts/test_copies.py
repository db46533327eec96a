"""Turns of copies: shares exact to one place, every copy used, one shape whatever the placement."""

import numpy as np
import pytest

from runtime.experts.copies import MIN_PLACES, copies_table, num_places
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import copy_shares, equal_shares, slot_shares

# One layer, two devices of three slots; experts 0 and 1 have a copy on each.
PLACEMENT = ExpertPlacement(np.array([[0, 1, 2, 0, 1, 3]]), 2, 4)


def test_equal_copies_alternate() -> None:
    table = copies_table(PLACEMENT)
    assert table.shape == (1, 4, MIN_PLACES)
    assert table[0, 0, :4].tolist() == [0, 3, 0, 3]
    assert set(table[0, 2]) == {2}
    assert set(table[0, 3]) == {5}


def test_equal_copies_alternate_as_with_equal_shares() -> None:
    """The short way and the general one agree; 1, 2 and 4 copies, whose shares are exact in floating point."""
    slots = np.array([[0, 1], [0, 2], [0, 3], [0, 1]])
    placement = ExpertPlacement(np.array([slots.ravel(), slots[::-1].ravel()]), 4, 4)
    general = copies_table(placement, copy_shares(placement, equal_shares(placement)))
    assert np.array_equal(copies_table(placement), general)
    assert copies_table(placement).dtype == np.int32


def test_shares_are_kept_to_one_place() -> None:
    loads = np.array([[8.0, 4.0, 6.0, 0.0]])
    slots = slot_shares(PLACEMENT, loads, 0.5)
    table = copies_table(PLACEMENT, copy_shares(PLACEMENT, slots))
    for expert, places in enumerate(table[0]):
        for slot in np.flatnonzero(PLACEMENT.slot_experts[0] == expert):
            assert (places == slot).sum() == pytest.approx(MIN_PLACES * slots[0, slot], abs=1)


def test_every_device_fits() -> None:
    assert [num_places(n) for n in (1, 32, 33, 144)] == [32, 32, 64, 256]
