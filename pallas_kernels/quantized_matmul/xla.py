"""By XLA: one turn of a loop for each block of rows that share an expert, whose weights alone are dequantised."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.xla import choose_block_sizes, plan_blocks
from pallas_kernels.grouped_matmul.reference import GATES
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
    num_rows, k = rows.shape
    columns = w.values.shape[1] // (1 if gate is None else 2)
    if num_rows == 0:
        return jnp.zeros((0, columns), jnp.bfloat16)
    size = choose_block_sizes(num_rows, group_sizes.shape[0])[-1]
    blocks = plan_blocks(group_sizes, num_rows, (size,))
    rows = jnp.pad(rows, ((0, size), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        row, expert = blocks.first_row[i], blocks.expert[i]
        one = QuantizedWeights(*(lax.dynamic_slice_in_dim(a, expert, 1) for a in (w.values, w.scales)))
        y = lax.dynamic_slice(rows, (row, 0), (size, k)) @ dequantise_weights(one)[0].T
        y = y if gate is None else GATES[gate](*jnp.split(y, 2, axis=1))
        # A block's surplus rows are overwritten by the next block, which starts where this group goes on or ends.
        return lax.dynamic_update_slice(out, y.astype(out.dtype), (row, 0))

    out = lax.fori_loop(0, blocks.count, step, jnp.zeros((num_rows + size, columns), jnp.bfloat16))[:num_rows]
    is_row = jnp.arange(num_rows) < jnp.sum(group_sizes)
    return jnp.where(is_row[:, None], out, 0)
