"""Decode attention that is obviously right: all pages of every row, one softmax, no blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention_reference(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B H Dh"]:
    """The op for tests, in float32: costs the width of the page table whatever the rows hold."""
    query_position = kv_len[:, None] - 1  # [B, 1]
    key_position = jnp.arange(page_table.shape[1] * pages.shape[3])[None, :]  # [1, T]
    may_see = key_position <= query_position
    if window is not None:
        may_see &= key_position > query_position - window
    k, v = row_keys_and_values(pages, page_table)
    out = masked_softmax_attention(q[:, None], k, v, may_see[:, None], sinks, soft_cap)
    return out[:, 0].astype(q.dtype)


def row_keys_and_values(
    pages: Float[Array, "N 2 K S Dh"], page_table: Int[Array, "R P"]
) -> tuple[Float[Array, "R T K Dh"], Float[Array, "R T K Dh"]]:
    """Everything that the pages of each row hold, in order of position; T = P * S."""
    gathered = pages[page_table].astype(jnp.float32)  # [R, P, 2, K, S, Dh]
    num_rows, num_pages, _, num_kv_heads, page_size, head_dim = gathered.shape
    in_order = gathered.transpose(2, 0, 1, 4, 3, 5)  # [2, R, P, S, K, Dh]
    k, v = in_order.reshape(2, num_rows, num_pages * page_size, num_kv_heads, head_dim)
    return k, v


def masked_softmax_attention(
    q: Float[Array, "R Q H Dh"],
    k: Float[Array, "R T K Dh"],
    v: Float[Array, "R T K Dh"],
    may_see: Array,  # [R, Q, T]
    sinks: Float[Array, " H"] | None,
    soft_cap: float | None,
) -> Float[Array, "R Q H Dh"]:
    """Each query over the keys that it may see; zeros where it may see none.

    soft_cap: scores become soft_cap * tanh(score / soft_cap). sinks: a score of each head that takes its share of the
    softmax and brings no value.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    is_seen = jnp.any(may_see, axis=1)[:, :, None, None]  # by any query: what nobody sees may be NaN
    k, v = jnp.where(is_seen, k, 0.0), jnp.where(is_seen, v, 0.0)
    scores = jnp.einsum("rqhd,rthd->rqht", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(may_see[:, :, None, :], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, None, :, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights if sinks is None else weights[..., :-1]
    weights = jnp.where(may_see[:, :, None, :], weights, 0.0)  # a row without keys has a softmax of NaN
    return jnp.einsum("rqht,rthd->rqhd", weights, v)
