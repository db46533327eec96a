"""What the ahead-of-time tool compiles: each op's cases.py lists its own as `AOT_CASES`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class AotCase:
    """A function with abstract arguments, at the shape of a real model.

    name: unique over all ops, "<op>/<shape>/<variant>".
    function: jittable; a kernel is called directly, not through the choice of backend, since no GPU is there to choose.
    args: positional, `jax.ShapeDtypeStruct` leaves.
    needs_wgmma: False for a kernel without products.
    max_spill_bytes: of one kernel; above 0 only with the reason beside the case.
    """

    name: str
    function: Callable[..., object]
    args: tuple[jax.ShapeDtypeStruct, ...]
    needs_wgmma: bool = True
    max_spill_bytes: int = 0


@dataclass(frozen=True)
class AotStep:
    """A whole step of a model on one GPU. Backends are chosen while it is traced, as on a Hopper GPU.

    args: positional trees of `jax.ShapeDtypeStruct`.
    max_temp_bytes: what it may allocate; a product computed densely, for every expert, takes many times more.
    """

    name: str
    function: Callable[..., object]
    args: tuple[Any, ...]
    max_temp_bytes: int
