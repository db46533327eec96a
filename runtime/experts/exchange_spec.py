"""Exchange: what a rung fixes about the way of its tokens to the devices that hold their experts, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from runtime.experts.exchange_kind import ExchangeKind

# (rows sorted by slot [M, D], rows of each slot [S]) -> results [M, D]; rows past the sum come back as zeros
Experts = Callable[[Array, Array], Array]

MIN_CAPACITY = 8


@dataclass(frozen=True)
class Exchange:
    """Static.

    capacity: rows from one device to another in one round of `all_to_all`.
    dispatch_dtype: type in which tokens travel to their experts; None: that of the weights. Results travel in the
        type of the weights.
    """

    kind: ExchangeKind
    num_devices: int
    axis: str
    capacity: int = 0
    dispatch_dtype: Any = None


def choose_capacity(num_tokens: int, top_k: int, num_devices: int, slots: int, factor: float) -> int:
    """Rows from one device to another in one round: `factor` times an even spread, never more than can occur.

    num_tokens: of one device. slots: expert slots of a device; a token's experts are distinct.
    """
    most = num_tokens * min(top_k, slots)
    even = -(-num_tokens * top_k // num_devices)
    wanted = -(-max(MIN_CAPACITY, int(even * factor)) // MIN_CAPACITY) * MIN_CAPACITY
    return min(most, wanted)
