"""ResidencyShape: the sizes of expert slots and store that an engine was built with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidencyShape:
    """Of all layers alike. is_sparse: which layers have experts. expert_bytes: weights of one expert of one layer."""

    is_sparse: tuple[bool, ...]
    num_experts: int
    num_slots: int
    expert_bytes: int
