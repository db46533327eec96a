"""ArraySpec: an array described before it exists; sizes and random weights follow from the description."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

# Random weights repeat one pattern of this many values: drawing 30 billion normals would take minutes. Prime, so
# that rows and experts of the usual sizes do not line up with it.
PATTERN_LENGTH = 1_048_573

# Puts the whole array, as it is on the host, where it belongs.
type Place = Callable[["ArraySpec", np.ndarray], jax.Array]


@dataclass(frozen=True)
class ArraySpec:
    """shape and dtype of an array, the names of its axes, and how dummy weights fill it.

    init: "normal" (standard deviation `scale`), "ones" or "zeros". in_host_memory: not in the device's, where the two differ.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    init: str = "normal"
    scale: float = 1.0
    in_host_memory: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)


def map_specs(function: Callable[[ArraySpec], Any], tree: Any) -> Any:
    """The tree with every ArraySpec replaced by `function` of it."""
    return jax.tree.map(function, tree, is_leaf=is_spec)


def device_nbytes(tree: Any) -> int:
    """Bytes of the ArraySpecs of a tree that lie in the device's memory."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree, is_leaf=is_spec) if not leaf.in_host_memory)


def host_memory() -> SingleDeviceSharding:
    """Where arrays lie that the device reads over its bus."""
    return SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")


def tree_nbytes(tree: Any) -> int:
    """Bytes of all arrays or ArraySpecs of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree, is_leaf=is_spec))


def to_shape_structs(tree: Any) -> Any:
    """The tree as jax.ShapeDtypeStruct, which is what lowering takes."""

    def one(spec: Any) -> jax.ShapeDtypeStruct:
        where = host_memory() if isinstance(spec, ArraySpec) and spec.in_host_memory else None
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)

    return map_specs(one, tree)


def on_one_device(spec: ArraySpec, host: np.ndarray) -> jax.Array:
    """The array as it is."""
    return jax.device_put(host)


def random_array(spec: ArraySpec, rng: np.random.Generator, place: Place = on_one_device) -> jax.Array:
    """Dummy weights for one array."""
    if spec.init == "ones":
        host = np.ones(spec.shape, spec.dtype)
    elif spec.init == "zeros":
        host = np.zeros(spec.shape, spec.dtype)
    elif spec.init == "normal":
        size = math.prod(spec.shape)
        pattern = rng.standard_normal(min(size, PATTERN_LENGTH), np.float32) * np.float32(spec.scale)
        host = np.resize(pattern.astype(spec.dtype), spec.shape)
    else:
        raise ValueError(f"init {spec.init!r} is not one of normal, ones, zeros")
    return place(spec, host)
