"""The table of copies that a compiled step reads: where the copies of each expert lie. Imports no JAX.

Its shape never changes, so a move costs no compile. How the copies share the rows of a step is decided in the step, by the
rows of that very step: `sharing.py`.
"""

import numpy as np

from runtime.experts.placement import ExpertPlacement


def table_len(num_experts: int, num_slots: int, max_copies: int) -> int:
    """Numbers in the table of one layer."""
    return num_experts * max_copies + num_slots


def copies_table(placement: ExpertPlacement) -> np.ndarray:
    """int32 [L, E * C + P]: by layer the slots of each expert's copies [E, C], -1 where there is none, and then for each slot
    where it stands in these, [P]: sums over copies and sums over devices both become sums over neighbours."""
    slots = placement.expert_slots.reshape(placement.num_layers, -1)
    layer, place = np.nonzero(slots >= 0)
    place_of_slot = np.empty_like(placement.slot_experts)
    place_of_slot[layer, slots[layer, place]] = place
    return np.concatenate([slots, place_of_slot], axis=1)
