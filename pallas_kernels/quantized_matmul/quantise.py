"""Arrays of one byte an element with float32 scales, and what turns floats into them.

    rows     x [N, K]     e4m3          one scale for 128 channels of a row       scales [K / 128, N]
    blocks   w [E, O, K]  e4m3          one for 128 x 128 weights                 scales [E, O / 128, K / 128]
    outputs  w [E, O, K]  int8 or e4m3  one for all weights of an output          scales [E, O]

A value is its byte times its scale. The largest of a scale's values becomes the type's largest finite number, so with a scale s

    e4m3   |error| <= max(|value| / 16, s / 1024)     3 bits of mantissa; below s / 64 the steps are even
    int8   |error| <= s / 2
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

BLOCK = 128  # channels and outputs that share a scale
E4M3 = jnp.float8_e4m3fn
LARGEST = {jnp.dtype(E4M3): 448.0, jnp.dtype(jnp.int8): 127.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedRows:
    """values [N, K] e4m3; scales [K / 128, N], so that a kernel reads those of neighbouring rows together."""

    values: Any
    scales: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeights:
    """values [E, O, K]; scales [E, O / 128, K / 128] for blocks, [E, O] for outputs."""

    values: Any
    scales: Any

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks; the rows are then quantised as well."""
        return len(self.scales.shape) == 3


def quantise_rows(x: Float[Array, "N K"]) -> QuantizedRows:
    """Raises ValueError where K is no multiple of 128."""
    num_rows, k = x.shape
    _check_blocks(k, "contraction")
    grouped = x.astype(jnp.float32).reshape(num_rows, k // BLOCK, BLOCK)
    scales = _scale_of(jnp.max(jnp.abs(grouped), axis=2), E4M3)  # [N, K / 128]
    return QuantizedRows(_rounded(grouped / scales[:, :, None], E4M3).reshape(x.shape), scales.T)


def quantise_blocks(w: Float[Array, "E O K"]) -> QuantizedWeights:
    """Raises ValueError where O or K is no multiple of 128."""
    num_experts, outputs, k = w.shape
    _check_blocks(outputs, "outputs")
    _check_blocks(k, "contraction")
    blocks = w.astype(jnp.float32).reshape(num_experts, outputs // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = _scale_of(jnp.max(jnp.abs(blocks), axis=(2, 4)), E4M3)
    return QuantizedWeights(_rounded(blocks / scales[:, :, None, :, None], E4M3).reshape(w.shape), scales)


def quantise_outputs(w: Float[Array, "E O K"], dtype: DTypeLike) -> QuantizedWeights:
    """dtype: int8 or float8_e4m3fn; raises ValueError for others."""
    if jnp.dtype(dtype) not in LARGEST:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}, expected one of {[d.name for d in LARGEST]}")
    w = w.astype(jnp.float32)
    scales = _scale_of(jnp.max(jnp.abs(w), axis=2), dtype)
    return QuantizedWeights(_rounded(w / scales[:, :, None], dtype), scales)


def dequantise_rows(x: QuantizedRows) -> Float[Array, "N K"]:
    """float32, exactly what the bytes and scales say."""
    return x.values.astype(jnp.float32) * jnp.repeat(x.scales.T, BLOCK, axis=1)


def dequantise_weights(w: QuantizedWeights) -> Float[Array, "E O K"]:
    """float32, exactly what the bytes and scales say."""
    values = w.values.astype(jnp.float32)
    if not w.has_blocks:
        return values * w.scales[:, :, None]
    return values * jnp.repeat(jnp.repeat(w.scales, BLOCK, axis=1), BLOCK, axis=2)


def _scale_of(largest: Array, dtype: DTypeLike) -> Array:
    """Where all is zero any scale will do, but none that divides by zero. NaN stays, for nobody should overlook it."""
    scale = largest / LARGEST[jnp.dtype(dtype)]
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def _rounded(x: Array, dtype: DTypeLike) -> Array:
    """To the nearest; clipped first, for what rounds past the largest e4m3 number would become NaN."""
    largest = LARGEST[jnp.dtype(dtype)]
    x = jnp.clip(x, -largest, largest)
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)


def _check_blocks(size: int, what: str) -> None:
    if size == 0 or size % BLOCK:
        raise ValueError(f"the {what} is {size}, expected a multiple of {BLOCK}")
