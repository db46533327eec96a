"""What the CPU runs: a loop over blocks of rows that share an expert, with as many turns as the rows need."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.reference import ACTIVATIONS


def expert_mlp_xla(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    activation: str,
) -> Float[Array, "N D"]:
    """Reads each expert that was hit once a block, and no other."""
    num_rows, d = x_sorted.shape
    block_rows = choose_block_rows(num_rows, group_sizes.shape[0])
    blocks_of = -(-group_sizes // block_rows)  # [E]
    last_block = jnp.cumsum(blocks_of)
    first_block = last_block - blocks_of
    first_row = jnp.cumsum(group_sizes) - group_sizes
    x = jnp.pad(x_sorted, ((0, block_rows), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        expert = jnp.searchsorted(last_block, i, side="right")
        row = first_row[expert] + (i - first_block[expert]) * block_rows
        rows = lax.dynamic_slice(x, (row, 0), (block_rows, d))
        y = _gated_mlp(rows, w_gate_up[expert], w_down[expert], activation)
        # A block's surplus rows are overwritten by the next block, which starts where this group ends.
        return lax.dynamic_update_slice(out, y.astype(out.dtype), (row, 0))

    out = lax.fori_loop(0, last_block[-1], step, jnp.zeros_like(x))[:num_rows]
    is_row = jnp.arange(num_rows) < jnp.sum(group_sizes)
    return jnp.where(is_row[:, None], out, 0)


def choose_block_rows(num_rows: int, num_experts: int) -> int:
    """About as many rows as an even spread gives an expert: small blocks waste no work, large ones reuse weights."""
    per_expert = num_rows / num_experts
    if per_expert <= 4:
        return 4
    return 8 if per_expert <= 8 else 16 if per_expert <= 16 else 32 if per_expert <= 32 else 64


def _gated_mlp(x: Array, w_gate_up: Array, w_down: Array, activation: str) -> Array:
    gate, up = jnp.split(_rows_dot(x, w_gate_up), 2, axis=-1)
    hidden = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
    return _rows_dot(hidden, w_down)


def _rows_dot(x: Array, w: Array) -> Array:
    """x [M, K] against w [N, K]: [M, N] in float32."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
