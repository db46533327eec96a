"""What the CPU runs: a loop over blocks of rows that share an expert, with as many turns as the rows need."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp.reference import ACTIVATIONS
from pallas_kernels.lanes import MAX_ROWS, lane_product, num_lanes


def expert_mlp_xla(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    activation: str,
) -> Float[Array, "N D"]:
    """Reads each expert that was hit once a block, and no other."""
    num_rows, d = x_sorted.shape
    sizes = choose_block_sizes(num_rows, group_sizes.shape[0])
    largest = sizes[-1]
    blocks = plan_blocks(group_sizes, num_rows, sizes)
    x = jnp.pad(x_sorted, ((0, largest), (0, 0)))

    def run_block(size: int, rows: Array, expert: Array) -> Array:
        y = _gated_mlp(rows[:size], w_gate_up, w_down, expert, activation)
        return jnp.pad(y.astype(x.dtype), ((0, largest - size), (0, 0)))

    branches = [lambda rows, expert, size=size: run_block(size, rows, expert) for size in sizes]

    def step(i: Array, out: Array) -> Array:
        row = blocks.first_row[i]
        rows = lax.dynamic_slice(x, (row, 0), (largest, d))
        if len(branches) == 1:
            y = branches[0](rows, blocks.expert[i])
        else:
            y = lax.switch(blocks.size_index[i], branches, rows, blocks.expert[i])
        # A block's surplus rows are overwritten by the next block, which starts where this group goes on or ends.
        return lax.dynamic_update_slice(out, y, (row, 0))

    out = lax.fori_loop(0, blocks.count, step, jnp.zeros_like(x))[:num_rows]
    is_row = jnp.arange(num_rows) < jnp.sum(group_sizes)
    return jnp.where(is_row[:, None], out, 0)


class Blocks(NamedTuple):
    """The turns of the loop; entries from `count` on are not visited."""

    count: Int[Array, ""]
    expert: Int[Array, " M"]
    first_row: Int[Array, " M"]
    size_index: Int[Array, " M"]  # into the block sizes: the smallest that holds what is left of the group


def choose_block_sizes(num_rows: int, num_experts: int) -> tuple[int, ...]:
    """Block sizes to compile, ascending, from what an even spread would give an expert.

    Up to four rows are multiplied without repacking the weights, at a cost that grows with each row; from there on
    a block is about as large as the busier groups, for repacking costs the same for 5 rows as for 16.
    """
    per_expert = num_rows / num_experts
    for limit, sizes in BLOCK_SIZES:
        if per_expert <= limit:
            return sizes
    return BLOCK_SIZES[-1][1]


# (largest mean group, block sizes): measured, see docs/moe_on_cpu.md.
BLOCK_SIZES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.5, (1,)),
    (1.25, (1, 2)),
    (2.5, (1, 4)),
    (5, (4, 8)),
    (24, (16,)),
    (float("inf"), (32, 64)),
)


def plan_blocks(group_sizes: Int[Array, " E"], num_rows: int, sizes: tuple[int, ...]) -> Blocks:
    """Cut every group into blocks of the largest size and one last block of whatever size holds the rest.

    Example, sizes (1, 8), groups 9, 0, 1: blocks (expert 0, row 0, size 8), (expert 0, row 8, size 1),
    (expert 2, row 9, size 1).
    """
    largest, num_experts = sizes[-1], group_sizes.shape[0]
    max_blocks = max(1, min(num_rows, num_rows // largest + num_experts))
    blocks_of = -(-group_sizes // largest)  # [E]
    last_block = jnp.cumsum(blocks_of)
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    expert = jnp.sum(last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    done = (block - (last_block - blocks_of)[expert]) * largest  # rows of this group in earlier blocks
    left = group_sizes[expert] - done
    return Blocks(
        count=last_block[-1],
        expert=expert,
        first_row=(jnp.cumsum(group_sizes) - group_sizes)[expert] + done,
        size_index=jnp.sum(
            left[:, None] > jnp.array(sizes[:-1], jnp.int32)[None, :], axis=1, dtype=jnp.int32
        ),
    )


def _gated_mlp(x: Array, w_gate_up: Array, w_down: Array, expert: Array, activation: str) -> Array:
    gate, up = jnp.split(_product(x, w_gate_up, expert), 2, axis=-1)
    hidden = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
    return _product(hidden, w_down, expert)


def _product(x: Array, w: Array, expert: Array) -> Array:
    """x [M, K] against w[expert] [O, K]: [M, O] in float32."""
    if x.shape[0] <= MAX_ROWS and num_lanes(x.shape[1]) is not None:
        return lane_product(x, w, expert)
    w_expert = lax.dynamic_index_in_dim(w, expert, keepdims=False)
    return lax.dot_general(x, w_expert, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
