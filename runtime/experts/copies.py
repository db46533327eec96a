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
    num_layers, num_slots = placement.slot_experts.shape
    width = placement.num_experts * placement.max_copies
    # All layers in a row: few calls, as the table of a layer that moves is made between two launches.
    experts = placement.slot_experts + placement.num_experts * np.arange(num_layers, dtype=np.int32)[:, None]
    order = np.argsort(experts, axis=None, kind="stable")
    experts = experts.ravel()[order]
    copy = np.arange(len(experts)) - np.searchsorted(experts, experts)  # the how-manieth of its expert
    place = experts * placement.max_copies + copy
    slots, place_of_slot = np.full(num_layers * width, -1, np.int32), np.empty(len(order), np.int32)
    slots[place] = order % num_slots
    place_of_slot[order] = place % width
    return np.concatenate([slots.reshape(num_layers, -1), place_of_slot.reshape(num_layers, -1)], axis=1)
