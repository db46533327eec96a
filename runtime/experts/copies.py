"""The table of copies that a compiled step reads: where the copies of each expert lie. Imports no JAX.

Its shape never changes, so a move costs no compile. How the copies share the rows of a step is decided in the step, by the
rows of that very step: `sharing.py`.
"""

import numpy as np

from runtime.experts.placement import ExpertPlacement


def copies_table(placement: ExpertPlacement) -> np.ndarray:
    """int32 [L, E, G]: the slot, of all devices, that each device has for each expert; -1 where it has none."""
    table = np.full((placement.num_layers, placement.num_experts, placement.num_devices), -1, np.int32)
    slots = np.arange(placement.num_slots)
    layers = np.arange(placement.num_layers)[:, None]
    table[layers, placement.slot_experts, slots // placement.slots_per_device] = slots
    return table
