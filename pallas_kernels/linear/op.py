"""A dense layer without bias; the weight keeps the checkpoint's orientation `[out, in]`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float


def linear(
    x: Float[Array, "B D"], w: Float[Array, "O D"], *, out_dtype: DTypeLike | None = None
) -> Float[Array, "B O"]:
    """x @ w.T accumulated in float32, in x's type unless `out_dtype` says otherwise (float32 for logits)."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape}, w {w.shape}: the last axes must be equal")
    with jax.named_scope("linear"):
        y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return y.astype(x.dtype if out_dtype is None else out_dtype)
