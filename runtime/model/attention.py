"""Attention's projections, and the two phases in between: each is one op over pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.op import linear
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.prefill_attention.op import prefill_attention
from runtime.model.architecture import Architecture, QkNorm
from runtime.model.batch import PrefillBatch
from runtime.model.layers import rms_norm, rotate
from runtime.model.params import AttentionParams
from runtime.model.sharding import ALONE, LayerSharding


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


def project_out(
    params: AttentionParams, attended: Float[Array, "T H Dh"], sharding: LayerSharding = ALONE
) -> Float[Array, "T D"]:
    """The output projection, in float32 for the residual."""
    flat = attended.reshape(attended.shape[0], -1).astype(params.w_o.dtype)
    out = sharding.add_up(linear(flat, params.w_o, out_dtype=jnp.float32))
    return out if params.b_o is None else out + params.b_o.astype(jnp.float32)[None, :]


def attend_decode(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    window: int | None,
) -> Float[Array, "B H Dh"]:
    """One query a row, at position kv_len - 1; rows with kv_len 0 come back as zeros."""
    return paged_attention(q, pages, page_table, kv_len, window=window)


def attend_prefill(
    q: Float[Array, "T H Dh"], pages: Float[Array, "N 2 K S Dh"], batch: PrefillBatch, window: int | None
) -> Float[Array, "T H Dh"]:
    """Each token attends to its row's pages up to itself; the chunk's own keys must be in the pages already."""
    rows = batch.page_table, batch.row_start, batch.row_len, batch.context_len
    return prefill_attention(q, pages, *rows, window=window)
