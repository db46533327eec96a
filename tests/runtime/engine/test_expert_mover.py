"""The mover: weights follow the placement whatever is ordered, and what does not fit is refused before anything is copied."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.expert_mover import ExpertMover, MisfitError
from runtime.experts.copies import copies_table
from runtime.experts.moves import plan_moves
from runtime.experts.placement import ExpertPlacement, Move
from tests.runtime.engine.expert_engine import SlotsInMemory

START = ExpertPlacement.uniform(3, 8, 4, 3)


def mover_of(placement: ExpertPlacement) -> tuple[ExpertMover, SlotsInMemory]:
    slots = SlotsInMemory(placement)
    return ExpertMover(slots, placement), slots


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from([2, 3]))
@settings(deadline=None, max_examples=30)
def test_weights_and_tables_follow_the_placement_after_every_turn(seed, max_moves, width):
    rng = np.random.default_rng(seed)
    start = ExpertPlacement.uniform(2, 8, 4, width)
    target = np.stack([rng.permutation(8) for _ in range(2)])[
        :, start.slot_experts[0]
    ]  # other names, as valid
    mover, slots = mover_of(start)
    mover.order(plan_moves(start, ExpertPlacement(target, 4, 8)))
    total = mover.num_waiting
    while mover.num_waiting:
        assert 0 < mover.turn(max_moves) <= max_moves
        np.testing.assert_array_equal(slots.weights, mover.placement.slot_experts)
        for layer, table in slots.tables.items():
            np.testing.assert_array_equal(table, copies_table(mover.placement)[layer])
    assert mover.num_applied == total
    assert mover.turn(max_moves) == 0


def test_a_move_that_does_not_fit_is_refused_and_what_waits_behind_it_is_gone():
    mover, slots = mover_of(START)
    row = START.slot_experts[0]
    only = next(s for s in range(12) if START.copies[0, row[s]] == 1)
    other = next(s for s in range(12) if row[s] != row[only] and s // 3 != only // 3)
    mover.order([Move(0, only, int(row[other]), other), Move(1, 0, 1, 1)])
    with pytest.raises(MisfitError, match="the only copy"):
        mover.turn(8)
    np.testing.assert_array_equal(slots.weights, START.slot_experts)
    assert mover.placement == START
    assert (mover.num_waiting, mover.num_applied) == (0, 0)


def test_an_engine_that_fails_is_no_move_that_does_not_fit(monkeypatch):
    """Serving must not go on: whether the weights were copied is not known."""
    mover, slots = mover_of(START)

    def fail(*_) -> None:
        raise ValueError("the device is gone")

    monkeypatch.setattr(slots, "move_experts", fail)
    mover.order([Move(0, 0, int(START.slot_experts[0, 11]), 11)])
    with pytest.raises(ValueError, match="the device is gone"):
        mover.turn(8)


def test_a_new_order_replaces_what_waits_and_the_price_is_measured_once():
    mover, slots = mover_of(START)
    mover.order([Move(0, 0, 0, 0)])
    mover.order([])
    assert mover.num_waiting == 0
    assert mover.move_s == mover.move_s
    assert slots.num_measured == 1
