"""The table of copies that a compiled step reads: which physical slot each row of a step takes. Imports no JAX.

For each expert R places; the n-th row of a step that wants it uses place n % R. Shares are thereby rounded to 1 / R, and
copies take turns, so that a step of few rows uses them all. The table's shape never changes, so neither moves nor
shares cost a compile.
"""

import numpy as np

from runtime.experts.placement import ExpertPlacement

MIN_PLACES = 32


def num_places(max_copies: int) -> int:
    """R: at least one place for each copy that an expert can have."""
    places = MIN_PLACES
    while places < max_copies:
        places *= 2
    return places


def copies_table(placement: ExpertPlacement, shares: np.ndarray | None = None) -> np.ndarray:
    """int32 [L, E, R] from the shares of copies [L, E, C] (`copy_shares`), by default equal ones.

    Smooth weighted turns: in each place the copy that is furthest behind its share. Shares 3/4 and 1/4 of slots 5 and 7
    in four places: 5 5 7 5.
    """
    table = _equal_turns(placement)
    if shares is None:
        return table
    layer, expert = np.nonzero(placement.copies > 1)  # the others have nothing to share
    slots, part = placement.expert_slots[layer, expert], shares[layer, expert]  # [N, C]
    owed, row = np.where(slots >= 0, 0.0, -np.inf), np.arange(len(slots))
    for place in range(table.shape[2]):
        owed += part
        chosen = np.argmax(owed, axis=1)
        owed[row, chosen] -= 1
        table[layer, expert, place] = slots[row, chosen]
    return table


def _equal_turns(placement: ExpertPlacement) -> np.ndarray:
    """The same for equal shares, without going through the places: this one is made between two steps."""
    places = np.arange(num_places(placement.max_copies))
    turns = places % placement.copies[:, :, None]
    return np.take_along_axis(placement.expert_slots, turns, axis=2)
