"""By XLA: one turn of a loop for each block of rows that share an expert. What Ampere and CPUs run; not dense."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.xla import choose_block_sizes, plan_blocks
from pallas_kernels.grouped_matmul.reference import GATES


def grouped_matmul_xla(
    x_sorted: Float[Array, "N K"],
    w: Float[Array, "E O K"],
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
) -> Float[Array, "N P"]:
    """The op: reads each expert that was hit once a block, and no other."""

    def product(rows: Array, expert: Array) -> Array:
        w_expert = lax.dynamic_index_in_dim(w, expert, keepdims=False)
        return lax.dot_general(rows, w_expert, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    return multiply_blocks(x_sorted, group_sizes, product, gate, x_sorted.dtype)


def multiply_blocks(
    x_sorted: Float[Array, "N K"],
    group_sizes: Int[Array, " E"],
    product: Callable[[Array, Array], Array],
    gate: str | None,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "N P"]:
    """product: (rows [M, K], expert) to float32 [M, O]. Rows past the groups return as zeros, whatever they held."""
    (num_rows, k), num_experts = x_sorted.shape, group_sizes.shape[0]
    size = choose_block_sizes(num_rows, num_experts)[-1]
    blocks = plan_blocks(group_sizes, num_rows, (size,))
    x = jnp.pad(x_sorted, ((0, size), (0, 0)))

    def multiply(rows: Array, expert: Array) -> Array:
        y = product(rows, expert)
        return (y if gate is None else GATES[gate](*jnp.split(y, 2, axis=1))).astype(dtype)

    def step(i: Array, out: Array) -> Array:
        row = blocks.first_row[i]
        y = multiply(lax.dynamic_slice(x, (row, 0), (size, k)), blocks.expert[i])
        # A block's surplus rows are overwritten by the next block, which starts where this group goes on or ends.
        return lax.dynamic_update_slice(out, y, (row, 0))

    out_type = jax.eval_shape(multiply, jax.ShapeDtypeStruct((size, k), x.dtype), jnp.int32(0))
    out = jnp.zeros((num_rows + size, out_type.shape[1]), dtype)
    out = lax.fori_loop(0, blocks.count, step, out)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < jnp.sum(group_sizes))[:, None], out, 0)
