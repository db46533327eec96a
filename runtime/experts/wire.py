"""Rows as they travel between devices: in a narrow type, with integers in the bits of further columns.

An exchange of the integers alone would be small, and XLA waits for such a one where it stands.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_MAX = 448.0


def to_wire(
    x: Float[Array, "M D"], dtype: Any = None, labels: Int[Array, "M L"] | None = None
) -> tuple[Array, ...]:
    """What is sent for rows of x. dtype: None for their own. fp8: one scale a row, so that its largest value is the
    largest that fp8 has; scale and labels are an array of their own then."""
    dtype = x.dtype if dtype is None else dtype
    if dtype != FP8:
        return (_join(x.astype(dtype), labels),)
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True), 1e-12) / FP8_MAX
    return (wide / scale).astype(FP8), _join(scale, labels)


def from_wire(arrived: tuple[Array, ...], dtype: Any, width: int) -> tuple[Float[Array, "N D"], Array]:
    """(rows of `width` values in `dtype`, labels [N, L])."""
    if len(arrived) == 1:
        (joined,) = arrived
        return joined[:, :width].astype(dtype), _labels_of(joined[:, width:])
    narrow, joined = arrived
    return (narrow.astype(jnp.float32) * joined[:, :1]).astype(dtype), _labels_of(joined[:, 1:])


def _join(x: Float[Array, "M D"], labels: Int[Array, "M L"] | None) -> Float[Array, "M D2"]:
    if labels is None:
        return x
    bits = lax.bitcast_convert_type(labels.astype(jnp.int32), x.dtype)
    return jnp.concatenate([x, bits.reshape(x.shape[0], -1)], axis=1)


def _labels_of(bits: Float[Array, "N B"]) -> Int[Array, "N L"]:
    parts = 4 // bits.dtype.itemsize  # columns of one int32
    if parts > 1:
        bits = bits.reshape(bits.shape[0], -1, parts)
    return lax.bitcast_convert_type(bits, jnp.int32)
