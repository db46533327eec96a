"""Absorbed latent attention by XLA: a loop over blocks of keys, as far as the longest row needs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.xla import KV_BLOCK_TOKENS, LOW_SCORE


def mla_attention_xla(
    q: Float[Array, "B H CR"],
    pages: Float[Array, "N S CR"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    num_latent: int,
    scale: float,
) -> Float[Array, "B H C"]:
    """The op; the softmax is taken online in float32 while the blocks pass."""
    num_rows, num_heads, width = q.shape
    page_size = pages.shape[1]
    block_pages = min(max(1, KV_BLOCK_TOKENS // page_size), page_table.shape[1])
    block_tokens = block_pages * page_size
    # A slice past the end would be moved back, over keys that were already seen.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    queries = q.astype(jnp.float32) * scale

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = state
        position = i * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        is_seen = position[None, :] < kv_len[:, None]  # [B, S]
        page_ids = lax.dynamic_slice(table, (0, i * block_pages), (num_rows, block_pages))
        keys = pages[page_ids].reshape(num_rows, block_tokens, width).astype(jnp.float32)
        keys = jnp.where(is_seen[:, :, None], keys, 0.0)
        scores = jnp.where(is_seen[:, None, :], jnp.einsum("bhc,bsc->bhs", queries, keys), LOW_SCORE)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(is_seen[:, None, :], jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        total = total * fade + jnp.sum(weights, axis=-1)
        added = jnp.einsum("bhs,bsc->bhc", weights, keys[:, :, :num_latent])
        return new_peak, total, mixed * fade[..., None] + added

    heads = (num_rows, num_heads)
    empty = jnp.full(heads, LOW_SCORE), jnp.zeros(heads), jnp.zeros((*heads, num_latent))
    _, total, mixed = lax.fori_loop(0, -(-jnp.max(kv_len, initial=0) // block_tokens), step, empty)
    return (mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).astype(q.dtype)
