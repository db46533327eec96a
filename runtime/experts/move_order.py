"""Moves in a row as transfers: which slots a transfer writes, and where each one's weights lie before it. Imports no JAX."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from runtime.experts.placement import Move

SLOTS_A_TRANSFER = 2  # two copies, or one exchange


def transfers(moves: Iterable[Move]) -> Iterator[tuple[int, dict[int, int]]]:
    """(layer, {slot: where its new weights lie before the transfer}), in order; a transfer reads all before it writes.

    Slot 5 gets what 2 has, then 7 what 5 has by then: one transfer {5: 2, 7: 2}.
    """
    layer, source = -1, dict[int, int]()
    for move in moves:
        written = {move.to_slot, move.from_slot} if move.is_exchange else {move.to_slot}
        if move.layer != layer or len(source.keys() | written) > SLOTS_A_TRANSFER:
            if source:
                yield layer, source
            layer, source = move.layer, {}
        moved, displaced = (source.get(slot, slot) for slot in (move.from_slot, move.to_slot))
        source[move.to_slot] = moved
        if move.is_exchange:
            source[move.from_slot] = displaced
    if source:
        yield layer, source


def order_of(source: Mapping[int, int], table: np.ndarray) -> np.ndarray:
    """int32, as the compiled move takes it: (to_slot, from_slot) for each slot that is written, numbered over all devices, -1
    where there is none; then the layer's table of copies from then on. One array, as each is a transfer to every device."""
    order = np.full((SLOTS_A_TRANSFER, 2), -1, np.int32)
    order[: len(source)] = list(source.items())
    return np.concatenate([order.reshape(-1), table.reshape(-1)])
