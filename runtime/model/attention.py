"""Attention over pages: projections, and one loop over blocks of keys that prefill and decode share.

Cost follows the real context, not the width of the page table: the loop's bounds are data. Softmax is computed online
in float32 while the blocks pass, so no [queries, context] matrix exists.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.op import linear
from runtime.cache.kv_pool import read_pages
from runtime.model.architecture import Architecture, QkNorm
from runtime.model.batch import PrefillBatch
from runtime.model.layers import rms_norm, rotate
from runtime.model.params import AttentionParams

KV_BLOCK_TOKENS = 128  # keys of a row gathered in one turn of the loop, at least one page
# Elements of keys in a turn from which half the block costs no more per key, on CPU: then less is read past the end of
# each row. Below it, starting a turn costs more than that saves.
LARGE_TURN = 2**20
QUERY_BLOCK_TOKENS = 64  # prompt tokens of one row that share a pass over the keys
NEVER = jnp.iinfo(jnp.int32).max
LOW_SCORE = -1e30  # finite: minus infinity would give NaN where a block holds no key for a query


def project_qkv(
    arch: Architecture,
    params: AttentionParams,
    x: Float[Array, "T D"],
    cos: Float[Array, "T 1 C"],
    sin: Float[Array, "T 1 C"],
) -> tuple[Float[Array, "T H Dh"], Float[Array, "T K Dh"], Float[Array, "T K Dh"]]:
    """Queries and keys normalised and rotated, and values; all float32."""
    qkv = linear(x, params.w_qkv, out_dtype=jnp.float32)
    if params.b_qkv is not None:
        qkv = qkv + params.b_qkv.astype(jnp.float32)[None, :]
    q, k, v = jnp.split(qkv, [arch.q_size, arch.q_size + arch.kv_size], axis=-1)
    if arch.qk_norm is QkNorm.FULL:
        q, k = rms_norm(q, params.q_norm, arch.rms_norm_eps), rms_norm(k, params.k_norm, arch.rms_norm_eps)
    if arch.clip_qkv is not None:
        q, k, v = (jnp.clip(a, -arch.clip_qkv, arch.clip_qkv) for a in (q, k, v))
    q, k, v = (a.reshape(a.shape[0], -1, arch.head_dim) for a in (q, k, v))
    if arch.qk_norm is QkNorm.PER_HEAD:
        q, k = rms_norm(q, params.q_norm, arch.rms_norm_eps), rms_norm(k, params.k_norm, arch.rms_norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def project_out(params: AttentionParams, attended: Float[Array, "T H Dh"]) -> Float[Array, "T D"]:
    """The output projection, in float32 for the residual."""
    flat = attended.reshape(attended.shape[0], -1).astype(params.w_o.dtype)
    out = linear(flat, params.w_o, out_dtype=jnp.float32)
    return out if params.b_o is None else out + params.b_o.astype(jnp.float32)[None, :]


def attend_decode(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    window: int | None,
) -> Float[Array, "B H Dh"]:
    """One query a row, at position kv_len - 1; rows with kv_len 0 come back as zeros.

    All rows advance together, as far as the longest needs.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    positions = jnp.broadcast_to(kv_len[:, None] - 1, (num_rows, num_heads // num_kv_heads))
    return _attend_blocks(grouped, positions, pages, page_table, kv_len, window).reshape(q.shape)


def attend_prefill(
    q: Float[Array, "T H Dh"], pages: Float[Array, "N 2 K S Dh"], batch: PrefillBatch, window: int | None
) -> Float[Array, "T H Dh"]:
    """Each token attends to its row's pages up to itself; the chunk's own keys must be in the pages already.

    One turn per block of queries of one row, rows in order. A block may run past its row's end: what it writes there
    is overwritten by the next row, whose blocks come later.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    block = min(QUERY_BLOCK_TOKENS, num_tokens)
    last_block = jnp.cumsum(
        -(-batch.row_len // block), dtype=jnp.int32
    )  # [R], exclusive end of each row's blocks
    queries = jnp.pad(q, ((0, block), (0, 0), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        row = jnp.sum(last_block <= i, dtype=jnp.int32)
        first_block = jnp.where(row > 0, last_block[row - 1], 0)
        offset = (i - first_block) * block  # of the block in its chunk
        start = batch.row_start[row] + offset
        position = batch.context_len[row] + offset
        kv_len = batch.context_len[row] + jnp.minimum(offset + block, batch.row_len[row])
        table = lax.dynamic_slice_in_dim(batch.page_table, row, 1)
        own = lax.dynamic_slice_in_dim(queries, start, block)  # [Q, H, Dh]
        own = own.reshape(block, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        own = own.reshape(1, num_kv_heads, block * group, head_dim)
        positions = jnp.repeat(position + jnp.arange(block, dtype=jnp.int32), group)
        attended = _attend_blocks(own, positions[None, :], pages, table, kv_len[None], window)
        attended = attended.reshape(num_kv_heads, block, group, head_dim).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out, attended.reshape(block, num_heads, head_dim), start, 0)

    return lax.fori_loop(0, last_block[-1], step, jnp.zeros_like(queries))[:num_tokens]


def _attend_blocks(
    q: Float[Array, "B K Q Dh"],
    positions: Int[Array, "B Q"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    window: int | None,
) -> Float[Array, "B K Q Dh"]:
    """Query n of row b, at positions[b, n], over keys [0, kv_len[b]) that are not after it nor outside the window."""
    num_rows, num_table_pages = page_table.shape
    page_size, head_dim = pages.shape[3], pages.shape[4]
    block_pages = min(max(1, _keys_a_turn(num_rows, pages) // page_size), num_table_pages)
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
        scores = jnp.where(may_see, jnp.einsum("bkqd,bksd->bkqs", q, k), LOW_SCORE)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(may_see, jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        total = total * fade + jnp.sum(weights, axis=-1)
        mixed = mixed * fade[..., None] + jnp.einsum("bkqs,bksd->bkqd", weights, v)
        return new_peak, total, mixed

    empty = jnp.full(q.shape[:-1], LOW_SCORE), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)
    _, total, mixed = lax.fori_loop(first, last, step, empty)
    return mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]


def _keys_a_turn(num_rows: int, pages: Float[Array, "N 2 K S Dh"]) -> int:
    """How many keys of each row one turn of the loop takes."""
    elements = num_rows * KV_BLOCK_TOKENS * pages.shape[2] * pages.shape[4]
    is_large = jax.default_backend() == "cpu" and elements >= LARGE_TURN
    return KV_BLOCK_TOKENS // 2 if is_large else KV_BLOCK_TOKENS
