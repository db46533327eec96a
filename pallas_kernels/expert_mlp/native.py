"""The C++ kernel for CPUs with AVX-512 BF16: each expert that was hit is read once, whatever its rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native.library import max_panel_rows, scratch_shape, target

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # enum Activation in activations.h


def expert_mlp_native(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    activation: str,
    *,
    max_threads: int = 0,
) -> Float[Array, "N D"]:
    """The op by one custom call. max_threads: 0 for as many as the client's pool and the process's cores allow."""
    num_rows, d = x_sorted.shape
    f = w_down.shape[2]
    if x_sorted.size == 0:
        return x_sorted
    scratch = scratch_shape(max_panel_rows(num_rows) * (d + f) + num_rows * f)
    out = jax.ShapeDtypeStruct(x_sorted.shape, x_sorted.dtype)
    call = jax.ffi.ffi_call(target("expert_mlp"), [out, scratch], vmap_method="sequential")
    y, _ = call(
        x_sorted,
        w_gate_up,
        w_down,
        group_sizes.astype(jnp.int32),
        activation=np.int32(ACTIVATION_CODES[activation]),
        max_threads=np.int32(max_threads),
    )
    return y
