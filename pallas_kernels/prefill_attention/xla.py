"""Prefill attention by XLA: one turn for each block of queries of one row, each a pass over that row's keys."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.xla import attend_blocks

QUERY_BLOCK_TOKENS = 64  # prompt tokens of one row that share a pass over the keys


def prefill_attention_xla(
    q: Float[Array, "T H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "R P"],
    row_start: Int[Array, " R"],
    row_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T H Dh"]:
    """The op, rows in order. A block may run past its row's end: what it writes there is overwritten by the next row,
    whose blocks come later.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    block = min(QUERY_BLOCK_TOKENS, num_tokens)
    last_block = jnp.cumsum(-(-row_len // block), dtype=jnp.int32)  # [R], exclusive end of each row's blocks
    queries = jnp.pad(q, ((0, block), (0, 0), (0, 0)))
    if sinks is not None:
        sinks = jnp.tile(
            sinks.reshape(num_kv_heads, group), (1, block)
        )  # [K, Q], heads fastest as in the queries

    def step(i: Array, out: Array) -> Array:
        row = jnp.sum(last_block <= i, dtype=jnp.int32)
        first_block = jnp.where(row > 0, last_block[row - 1], 0)
        offset = (i - first_block) * block  # of the block in its chunk
        start = row_start[row] + offset
        position = context_len[row] + offset
        kv_len = context_len[row] + jnp.minimum(offset + block, row_len[row])
        table = lax.dynamic_slice_in_dim(page_table, row, 1)
        own = lax.dynamic_slice_in_dim(queries, start, block)  # [Q, H, Dh]
        own = own.reshape(block, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        own = own.reshape(1, num_kv_heads, block * group, head_dim)
        positions = jnp.repeat(position + jnp.arange(block, dtype=jnp.int32), group)
        attended = attend_blocks(
            own, positions[None, :], pages, table, kv_len[None], window=window, sinks=sinks, soft_cap=soft_cap
        )
        attended = attended.reshape(num_kv_heads, block, group, head_dim).transpose(1, 0, 2, 3)
        attended = attended.reshape(block, num_heads, head_dim).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(out, attended, start, 0)

    return lax.fori_loop(0, last_block[-1], step, jnp.zeros_like(queries))[:num_tokens]
