"""By XLA: the loop of `grouped_matmul` over blocks of rows that share an expert, whose weights alone are dequantised."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.xla import multiply_blocks
from pallas_kernels.quantized_matmul.quantise import (
    QuantizedRows,
    QuantizedWeights,
    dequantise_rows,
    dequantise_weights,
)


def quantized_matmul_xla(
    x: QuantizedRows | Float[Array, "N K"],
    w: QuantizedWeights,
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
) -> Float[Array, "N P"]:
    """The op: reads each expert that was hit once a block, and no other."""
    rows = dequantise_rows(x) if isinstance(x, QuantizedRows) else x.astype(jnp.float32)

    def product(rows: Array, expert: Array) -> Array:
        one = QuantizedWeights(*(lax.dynamic_slice_in_dim(a, expert, 1) for a in (w.values, w.scales)))
        return rows @ dequantise_weights(one)[0].T

    return multiply_blocks(rows, group_sizes, product, gate, jnp.bfloat16)
