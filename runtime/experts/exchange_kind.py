"""ExchangeKind: how tokens get to the devices that hold their experts. A property of a rung. Imports no JAX."""

from enum import StrEnum


class ExchangeKind(StrEnum):
    """`local`: one device holds all experts. The other three give the same result at different cost.

    gather: every device gets all tokens and adds up what its own experts say; few collectives, for small steps.
    all_to_all: every device sends each token to the devices of its experts, so many a round; for large steps.
    ragged: the same with buffers of exact size; GPUs and TPUs only.
    """

    LOCAL = "local"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    RAGGED = "ragged"
