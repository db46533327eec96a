"""A kernel at a real shape with real arrays: what tuning sweeps, what the check on a chip compares and times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.interpret import InterpretParams

Fields = Mapping[str, int]  # a tile as the tables hold it


@dataclass(frozen=True)
class Prepared:
    """One call, cut in one way.

    function: (link, *args) to the result. Jittable.
    links: int32 arrays, same shape. They say which experts or pages are read; with each in turn, no call finds what the
        last one left in the cache. The first is the one that is compared.
    sampled: index into the result's first axis of the rows that are compared.
    """

    function: Callable[..., jax.Array]
    links: tuple[jax.Array, ...]
    args: tuple[jax.Array, ...]
    sampled: jax.Array


@dataclass(frozen=True)
class Workload:
    """A shape of a model.

    key: its name in the op's table of tiles. default: what runs where the table lacks it.
    candidates: the tiles that tuning tries, each valid for this shape.
    prepare: a tile's fields (None: what the op would choose) and how to interpret; raises where the tile does not fit.
    expected: float32 values of the sampled rows.
    num_bytes: that must be read or written. num_flops: multiplications and additions.
    """

    name: str
    op: str
    key: str
    default: Fields
    candidates: tuple[Fields, ...]
    prepare: Callable[[Fields | None, InterpretParams | None], Prepared]
    expected: Callable[[], np.ndarray]
    num_bytes: int
    num_flops: int

    def bound_s(self, bytes_per_s: float, flops_per_s: float) -> tuple[float, str]:
        """The least time, and what sets it: "memory" or "compute"."""
        memory_s, compute_s = self.num_bytes / bytes_per_s, self.num_flops / flops_per_s
        return (memory_s, "memory") if memory_s >= compute_s else (compute_s, "compute")


@dataclass(frozen=True)
class Errors:
    """Of one comparison. max_error: the largest difference over the largest expected value. A NaN is never right."""

    max_error: float
    num_wrong: int
    num_values: int

    @property
    def is_right(self) -> bool:
        return self.num_wrong == 0


def compare(actual: Any, expected: Any, tolerance: float = 2e-2) -> Errors:
    """Right is a value within tolerance * (1 + |expected|): one rounding to bfloat16 is 0.004."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    if actual.shape != expected.shape:
        raise ValueError(f"the result has shape {actual.shape}, expected {expected.shape}")
    if actual.size == 0:
        return Errors(0.0, 0, 0)
    difference = np.abs(actual - expected)
    is_wrong = ~(difference <= tolerance * (1 + np.abs(expected)))  # NaN is on this side
    largest = float(np.max(np.abs(expected))) or 1.0
    worst = float(np.max(difference)) / largest
    return Errors(worst if np.isfinite(worst) else float("inf"), int(is_wrong.sum()), actual.size)
