"""Prefill attention that is obviously right: every token gathers all pages of its row and takes one softmax."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import masked_softmax_attention, row_keys_and_values


def prefill_attention_reference(
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
    """The op for tests, in float32: [tokens, width of the page table] keys for each head."""
    row, offset, is_real = row_of_tokens(row_start, row_len, q.shape[0])
    query_position = (context_len[row] + offset)[:, None]
    key_position = jnp.arange(page_table.shape[1] * pages.shape[3])[None, :]
    may_see = (key_position <= query_position) & is_real[:, None]
    if window is not None:
        may_see &= key_position > query_position - window
    k, v = row_keys_and_values(pages, page_table[row])  # [T, P * S, K, Dh]
    out = masked_softmax_attention(q[:, None], k, v, may_see[:, None], sinks, soft_cap)
    return out[:, 0].astype(q.dtype)


def row_of_tokens(
    row_start: Int[Array, " R"], row_len: Int[Array, " R"], num_tokens: int
) -> tuple[Int[Array, " T"], Int[Array, " T"], Array]:
    """For each flat place: its row, its offset in that row's chunk, and whether a token is there."""
    flat = jnp.arange(num_tokens, dtype=jnp.int32)
    starts_before = row_start[None, :] <= flat[:, None]  # [T, R]
    row = jnp.sum(starts_before, axis=1, dtype=jnp.int32) - 1
    has_row, row = row >= 0, jnp.maximum(row, 0)
    offset = flat - row_start[row]
    return row, offset, has_row & (offset < row_len[row])
