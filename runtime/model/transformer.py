"""The forward pass: embedding, layers, and the two phases. Pure functions of (params, pool, batch).

The residual stream is float32; the inputs of products are rounded to the weights' type. Keys and values are written to
the pages first and attention reads pages only, so a token sees the same numbers in either phase.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear.op import linear
from runtime.cache.kv_pool import KVPool, write_pages, write_tokens
from runtime.experts.layer import moe_layer
from runtime.experts.weights import MoEParams
from runtime.model.architecture import Architecture, LayerKind
from runtime.model.attention import attend_decode, attend_prefill, project_out, project_qkv
from runtime.model.batch import DecodeBatch, PrefillBatch, decode_page_ids, locate_tokens, prefill_page_ids
from runtime.model.layers import dense_ffn, rms_norm, rope_tables
from runtime.model.params import LayerParams, Params

# (layer's kind, its pages, q, k, v) -> (attended [T, H, Dh], pages with k and v written)
AttendFunction = Callable[[LayerKind, Array, Array, Array, Array], tuple[Array, Array]]


def forward_prefill(
    arch: Architecture, params: Params, pool: KVPool, batch: PrefillBatch, *, page_size: int
) -> tuple[Float[Array, "T D"], KVPool, Int[Array, "L E"]]:
    """Computes every chunk and writes its pages: (hidden before the final norm, pool, tokens of each expert)."""
    places = locate_tokens(batch)
    page_ids = prefill_page_ids(batch, page_size)

    def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        pages = write_pages(pages, k, v, page_ids)
        return attend_prefill(q, pages, batch, layer.sliding_window), pages

    return _forward(arch, params, pool, batch.tokens, places.position, places.is_real, attend)


def forward_decode(
    arch: Architecture, params: Params, pool: KVPool, batch: DecodeBatch, *, page_size: int
) -> tuple[Float[Array, "B D"], KVPool, Int[Array, "L E"]]:
    """Computes one token a row and writes it to its page: (hidden before the final norm, pool, tokens of each expert)."""
    positions = jnp.where(batch.active, batch.positions, 0)
    kv_len = jnp.where(batch.active, batch.positions + 1, 0)
    page_ids = decode_page_ids(batch, page_size)

    def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        pages = write_tokens(pages, k, v, page_ids, positions % page_size)
        return attend_decode(q, pages, batch.page_table, kv_len, layer.sliding_window), pages

    return _forward(arch, params, pool, batch.tokens, positions, batch.active, attend)


def unembed(arch: Architecture, params: Params, hidden: Float[Array, "N D"]) -> Float[Array, "N V"]:
    """Final norm and logits, float32."""
    with jax.named_scope("unembed"):
        weight = params.embedding if params.unembedding is None else params.unembedding
        normed = rms_norm(hidden, params.final_norm, arch.rms_norm_eps).astype(weight.dtype)
        return linear(normed, weight, out_dtype=jnp.float32)


def _forward(
    arch: Architecture,
    params: Params,
    pool: KVPool,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    is_real: Bool[Array, " T"],
    attend: AttendFunction,
) -> tuple[Float[Array, "T D"], KVPool, Int[Array, "L E"]]:
    with jax.named_scope("embed"):
        x = params.embedding[tokens].astype(jnp.float32)
        cos, sin = rope_tables(arch.rope, positions)
    new_pages, counts = [], []
    for layer, weights, pages in zip(arch.layers, params.layers, pool.pages, strict=True):
        with jax.named_scope("attention"):
            normed = rms_norm(x, weights.attention_norm, arch.rms_norm_eps).astype(
                weights.attention.w_qkv.dtype
            )
            q, k, v = project_qkv(arch, weights.attention, normed, cos, sin)
            attended, written = attend(layer, pages, q, k, v)
            x = x + project_out(weights.attention, attended)
        mixed, layer_counts = _ffn(arch, weights, x, is_real)
        x = x + mixed
        new_pages.append(written)
        counts.append(layer_counts)
    return x, KVPool(tuple(new_pages)), jnp.stack(counts)


def _ffn(
    arch: Architecture, weights: LayerParams, x: Float[Array, "T D"], is_real: Bool[Array, " T"]
) -> tuple[Float[Array, "T D"], Int[Array, " E"]]:
    normed = rms_norm(x, weights.ffn_norm, arch.rms_norm_eps)
    if isinstance(weights.ffn, MoEParams):
        return moe_layer(
            weights.ffn,
            normed,
            is_real,
            routing=arch.routing,
            activation=arch.activation,
        )
    with jax.named_scope("dense_ffn"):
        mixed = dense_ffn(weights.ffn, normed.astype(weights.ffn.w_gate_up.dtype), arch.activation)
        return mixed, jnp.zeros(arch.num_experts, jnp.int32)
