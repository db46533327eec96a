"""The product of what the bytes stand for, in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.quantized_matmul.quantise import (
    QuantizedRows,
    QuantizedWeights,
    dequantise_rows,
    dequantise_weights,
)


def quantized_matmul_reference(
    x: QuantizedRows | Float[Array, "N K"],
    w: QuantizedWeights,
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
) -> Float[Array, "N P"]:
    """The op for tests: costs E times too much, and writes out all weights."""
    rows = dequantise_rows(x) if isinstance(x, QuantizedRows) else x.astype(jnp.float32)
    return grouped_matmul_reference(rows, dequantise_weights(w), group_sizes, gate).astype(jnp.bfloat16)
