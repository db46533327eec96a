"""Transfers carry out what the moves say, one after another, in fewer steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.experts.move_order import SLOTS_A_TRANSFER, order_of, transfers
from runtime.experts.placement import Move

SLOTS = st.integers(0, 5)
MOVES = st.lists(st.builds(Move, st.integers(0, 1), SLOTS, st.just(0), SLOTS, st.booleans()), max_size=12)


@given(MOVES)
def test_transfers_leave_what_the_moves_leave(moves: list[Move]) -> None:
    one_by_one = np.arange(12).reshape(2, 6)
    for move in moves:
        row = one_by_one[move.layer]
        moved, displaced = row[move.from_slot], row[move.to_slot]
        row[move.to_slot] = moved
        if move.is_exchange:
            row[move.from_slot] = displaced
    launched = np.arange(12).reshape(2, 6)
    for layer, source in transfers(moves):
        assert 1 <= len(source) <= SLOTS_A_TRANSFER
        before = launched[layer].copy()
        order = order_of(source, np.zeros(3, np.int32))
        for to_slot, from_slot in order[:-3].reshape(-1, 2):
            if to_slot >= 0:
                launched[layer, to_slot] = before[from_slot]
    assert launched.tolist() == one_by_one.tolist()


def test_two_copies_in_a_layer_are_one_transfer() -> None:
    found = list(transfers([Move(3, 5, 0, 2), Move(3, 7, 0, 5), Move(4, 1, 0, 2), Move(4, 3, 0, 4, True)]))
    assert found == [(3, {5: 2, 7: 2}), (4, {1: 2}), (4, {3: 4, 4: 3})]
    assert order_of({1: 2}, np.array([[7, 8], [9, -1]], np.int32)).tolist() == [1, 2, -1, -1, 7, 8, 9, -1]
