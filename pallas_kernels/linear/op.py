"""A dense layer without bias; the weight keeps the checkpoint's orientation `[out, in]`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.lanes import MAX_ROWS, lane_product, num_lanes
from pallas_kernels.linear.native import linear_native
from pallas_kernels.linear.reference import linear_reference
from pallas_kernels.native.library import unfit_for_native


def linear(
    x: Float[Array, "B D"],
    w: Float[Array, "O D"],
    *,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> Float[Array, "B O"]:
    """x @ w.T accumulated in float32, in x's type unless `out_dtype` says otherwise (float32 for logits).

    In XLA up to four rows take the form that reads the weight without repacking it; the choice is static in B.
    backend: a name of `IMPLEMENTATIONS`; by default the best that runs here.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape}, w {w.shape}: the last axes must be equal")
    name = choose_linear(x, w, backend).name
    with jax.named_scope("linear"):
        return IMPLEMENTATIONS[name](x, w).astype(x.dtype if out_dtype is None else out_dtype)


def choose_linear(
    x: Array | jax.ShapeDtypeStruct, w: Array | jax.ShapeDtypeStruct, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit_for_native(x, w))


def _linear_xla(x: Array, w: Array) -> Array:
    num_rows = x.shape[0]
    if jax.default_backend() != "cpu":
        return _dot(x, w)
    if num_rows <= MAX_ROWS and num_lanes(x.shape[1]) is not None:
        return lane_product(x, w[None], 0)
    if num_rows == 1:
        # A bfloat16 dot of one row is 30 times slower than one of two: XLA writes it out as scalar code.
        return _dot(jnp.pad(x, ((0, 1), (0, 0))), w)[:1]
    return _dot(x, w)


def _dot(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


IMPLEMENTATIONS = {"native": linear_native, "xla": _linear_xla, "reference": linear_reference}
