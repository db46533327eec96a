"""Attention over pages by XLA: one loop over blocks of keys, which prefill attention uses too.

Cost follows the real context, not the width of the page table: the loop's bounds are data. Softmax is computed online
in float32 while the blocks pass, so no [queries, context] matrix exists.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

KV_BLOCK_TOKENS = 128  # keys of a row gathered in one turn of the loop, at least one page
# Elements of keys in a turn from which half the block costs no more per key, on CPU: then less is read past the end of
# each row. Below it, starting a turn costs more than that saves.
LARGE_TURN = 2**20
NEVER = jnp.iinfo(jnp.int32).max
LOW_SCORE = -1e30  # finite: minus infinity would give NaN where a block holds no key for a query


def paged_attention_xla(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B H Dh"]:
    """The op: all rows advance together, as far as the longest needs."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_rows, num_kv_heads, group, head_dim)
    positions = jnp.broadcast_to(kv_len[:, None] - 1, (num_rows, group))
    sinks = None if sinks is None else sinks.reshape(num_kv_heads, group)
    out = attend_blocks(
        grouped, positions, pages, page_table, kv_len, window=window, sinks=sinks, soft_cap=soft_cap
    )
    return out.reshape(q.shape).astype(q.dtype)


def attend_blocks(
    q: Float[Array, "B K Q Dh"],
    positions: Int[Array, "B Q"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    window: int | None,
    sinks: Float[Array, "K Q"] | None,
    soft_cap: float | None,
) -> Float[Array, "B K Q Dh"]:
    """Query n of row b, at positions[b, n], over keys [0, kv_len[b]) that are not after it nor outside the window."""
    num_rows, num_table_pages = page_table.shape
    page_size, head_dim = pages.shape[3], pages.shape[4]
    block_pages = min(max(1, keys_a_turn(num_rows, pages) // page_size), num_table_pages)
    block_tokens = block_pages * page_size
    # A slice past the end would be moved back, over keys that were already seen.
    table = jnp.pad(page_table, ((0, 0), (0, -num_table_pages % block_pages)))
    q = q.astype(jnp.float32) * head_dim**-0.5

    first = jnp.int32(0)
    earliest = jnp.zeros_like(kv_len)  # first key that any query of the row may see
    if window is not None:
        earliest = jnp.maximum(jnp.min(positions, axis=1) - window + 1, 0)
        first = jnp.min(jnp.where(kv_len > 0, earliest, NEVER)) // block_tokens
    last = -(-jnp.max(kv_len) // block_tokens)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = state
        key_positions = i * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)  # [S]
        page_ids = lax.dynamic_slice(table, (0, i * block_pages), (num_rows, block_pages))
        is_valid = (key_positions[None, :] < kv_len[:, None]) & (key_positions[None, :] >= earliest[:, None])
        k, v = read_pages(pages, page_ids, is_valid)
        may_see = key_positions[None, None, :] <= jnp.minimum(positions, kv_len[:, None] - 1)[:, :, None]
        if window is not None:
            may_see &= key_positions[None, None, :] > positions[:, :, None] - window
        may_see = may_see[:, None]  # [B, 1, Q, S]
        scores = jnp.einsum("bkqd,bksd->bkqs", q, k)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(may_see, scores, LOW_SCORE)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(may_see, jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        total = total * fade + jnp.sum(weights, axis=-1)
        mixed = mixed * fade[..., None] + jnp.einsum("bkqs,bksd->bkqd", weights, v)
        return new_peak, total, mixed

    empty = jnp.full(q.shape[:-1], LOW_SCORE), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)
    if sinks is not None:  # as if a key with this score and a value of zeros had passed
        peak = jnp.broadcast_to(sinks.astype(jnp.float32)[None], q.shape[:-1])
        empty = peak, jnp.ones(q.shape[:-1]), jnp.zeros(q.shape)
    _, total, mixed = lax.fori_loop(first, last, step, empty)
    return mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]


def read_pages(
    pages: Float[Array, "N 2 K S Dh"], page_ids: Int[Array, "B M"], is_valid: Bool[Array, "B M*S"]
) -> tuple[Float[Array, "B K M*S Dh"], Float[Array, "B K M*S Dh"]]:
    """Keys and values of M pages a row, in float32; places that are not valid come back as zeros.

    Zeros rather than what was there: a weight of 0 times a stale NaN or infinity would still be NaN.
    """
    num_rows, num_tokens = is_valid.shape

    def gather(part: int) -> Array:
        block = pages[page_ids, part].transpose(0, 2, 1, 3, 4)  # [B, K, M, S, Dh]
        block = block.reshape(num_rows, block.shape[1], num_tokens, block.shape[-1]).astype(jnp.float32)
        return jnp.where(is_valid[:, None, :, None], block, 0.0)

    return gather(0), gather(1)


def keys_a_turn(num_rows: int, pages: Float[Array, "N 2 K S Dh"]) -> int:
    """How many keys of each row one turn of the loop takes."""
    elements = num_rows * KV_BLOCK_TOKENS * pages.shape[2] * pages.shape[4]
    is_large = jax.default_backend() == "cpu" and elements >= LARGE_TURN
    return KV_BLOCK_TOKENS // 2 if is_large else KV_BLOCK_TOKENS
