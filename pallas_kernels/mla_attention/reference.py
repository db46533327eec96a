"""Absorbed latent attention that is obviously right: all pages of every row, one softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mla_attention_reference(
    q: Float[Array, "B H CR"],
    pages: Float[Array, "N S CR"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    num_latent: int,
    scale: float,
) -> Float[Array, "B H C"]:
    """The op for tests, in float32: costs the width of the page table whatever the rows hold."""
    num_rows, num_places = page_table.shape[0], page_table.shape[1] * pages.shape[1]
    keys = pages[page_table].reshape(num_rows, num_places, -1).astype(jnp.float32)
    is_seen = jnp.arange(num_places)[None, :] < kv_len[:, None]  # [B, T]
    keys = jnp.where(is_seen[:, :, None], keys, 0.0)  # what nobody sees may be NaN
    scores = jnp.einsum("bhc,btc->bht", q.astype(jnp.float32), keys) * scale
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, :], scores, -jnp.inf), axis=-1)
    weights = jnp.where(is_seen[:, None, :], weights, 0.0)  # a row without keys has a softmax of NaN
    return jnp.einsum("bht,btc->bhc", weights, keys[:, :, :num_latent]).astype(q.dtype)
