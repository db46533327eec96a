"""The C++ kernel for CPUs with AVX-512 BF16: the weight is read once, whatever the rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.native.library import max_panel_rows, scratch_shape, target


def linear_native(
    x: Float[Array, "B D"], w: Float[Array, "O D"], *, max_threads: int = 0
) -> Float[Array, "B O"]:
    """x @ w.T in float32. max_threads: 0 for as many as the client's pool and the process's cores allow."""
    num_rows, d = x.shape
    out = jax.ShapeDtypeStruct((num_rows, w.shape[0]), jnp.float32)
    if num_rows * w.shape[0] * d == 0:
        return jnp.zeros(out.shape, out.dtype)
    scratch = scratch_shape(max_panel_rows(num_rows) * d)
    call = jax.ffi.ffi_call(target("linear"), [out, scratch], vmap_method="sequential")
    y, _ = call(x, w, max_threads=np.int32(max_threads))
    return y
