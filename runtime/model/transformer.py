"""The forward pass: embedding, layers, and the two phases. Pure functions of (params, pool, batch).

The residual stream is float32; the inputs of products are rounded to the weights' type. Keys and values are written to
the pages first and attention reads pages only, so a token sees the same numbers in either phase.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear.op import linear
from runtime.cache.kv_pool import KVPool, write_pages, write_tokens
from runtime.experts.asleep import Staged, foresee, part_resident_layer
from runtime.experts.layer import ExpertLoad, moe_stages, no_load
from runtime.experts.stages import Lane, Meeting, Stages, run_alone, run_in_turns
from runtime.experts.weights import MoEParams
from runtime.model.architecture import Architecture, LayerKind
from runtime.model.attention import attend_decode, attend_prefill, project_out, project_qkv
from runtime.model.batch import (
    DecodeBatch,
    PrefillBatch,
    decode_page_ids,
    locate_tokens,
    prefill_page_ids,
)
from runtime.model.halves import (
    choose_cut,
    halve_decode,
    halve_prefill,
    join_decode,
    join_prefill,
    keys_of_linear_part,
)
from runtime.model.layers import dense_ffn, rms_norm, rope_tables
from runtime.model.params import LayerParams, Params, has_store
from runtime.model.sharding import ALONE, LayerSharding

# (layer's kind, its pages, q, k, v) -> (attended [T, H, Dh], pages with k and v written)
AttendFunction = Callable[[LayerKind, Array, Array, Array, Array], tuple[Array, Array]]


class Half(NamedTuple):
    """What the layers need of a micro-batch; a step has two, or one that is all of it."""

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    is_real: Bool[Array, " T"]
    attend: AttendFunction


def forward_prefill(
    arch: Architecture,
    params: Params,
    pool: KVPool,
    batch: PrefillBatch,
    *,
    page_size: int,
    sharding: LayerSharding = ALONE,
) -> tuple[Float[Array, "T D"], KVPool, ExpertLoad]:
    """Computes every chunk and writes its pages: (hidden before the final norm, pool, load of the experts [L, ...])."""

    def prepare(part: PrefillBatch) -> Half:
        places = locate_tokens(part)
        page_ids = prefill_page_ids(part, page_size)

        def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            pages = write_pages(pages, k, v, page_ids)
            return attend_prefill(q, pages, part, layer.sliding_window), pages

        return Half(part.tokens, places.position, places.is_real, attend)

    if sharding.num_halves == 1:
        (x,), pool, load = _forward(arch, params, pool, [prepare(batch)], sharding)
        return x, pool, load
    cut = choose_cut(batch, page_size, keys_of_linear_part(arch))
    halves = [prepare(part) for part in halve_prefill(batch, cut)]
    (first, second), pool, load = _forward(arch, params, pool, halves, sharding)
    return join_prefill(first, second, cut), pool, load


def forward_decode(
    arch: Architecture,
    params: Params,
    pool: KVPool,
    batch: DecodeBatch,
    *,
    page_size: int,
    sharding: LayerSharding = ALONE,
) -> tuple[Float[Array, "B D"], KVPool, ExpertLoad]:
    """Computes one token a row and writes it to its page: (hidden before the final norm, pool, load of the experts)."""

    def prepare(part: DecodeBatch) -> Half:
        positions = jnp.where(part.active, part.positions, 0)
        kv_len = jnp.where(part.active, part.positions + 1, 0)
        page_ids = decode_page_ids(part, page_size)

        def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            pages = write_tokens(pages, k, v, page_ids, positions % page_size)
            return attend_decode(q, pages, part.page_table, kv_len, layer.sliding_window), pages

        return Half(part.tokens, positions, part.active, attend)

    if sharding.num_halves == 1:
        (x,), pool, load = _forward(arch, params, pool, [prepare(batch)], sharding)
        return x, pool, load
    (first, second), pool, load = _forward(
        arch, params, pool, [prepare(part) for part in halve_decode(batch)], sharding
    )
    return join_decode(first, second), pool, load


def unembed(arch: Architecture, params: Params, hidden: Float[Array, "N D"]) -> Float[Array, "N V"]:
    """Final norm and logits, float32."""
    with jax.named_scope("unembed"):
        weight = params.embedding if params.unembedding is None else params.unembedding
        normed = rms_norm(hidden, params.final_norm, arch.rms_norm_eps).astype(weight.dtype)
        return linear(normed, weight, out_dtype=jnp.float32)


def _forward(
    arch: Architecture, params: Params, pool: KVPool, halves: Sequence[Half], sharding: LayerSharding
) -> tuple[list[Float[Array, "T D"]], KVPool, ExpertLoad]:
    """One half to the end, or two lanes in turns: a stage of one beside the exchange of the other (docs/expert_parallel.md)."""
    pages = list(pool.pages)
    with jax.named_scope("embed"):
        hidden = [params.embedding[half.tokens].astype(jnp.float32) for half in halves]
        ropes = [rope_tables(arch.rope, half.positions) for half in halves]
    runs = [
        partial(_half_stages, arch, params, pages, half, rope, sharding)
        for half, rope in zip(halves, ropes, strict=True)
    ]
    if len(halves) == 1:
        results = [run_alone(runs[0]((hidden[0],)))]
    else:
        first, second = (Lane(f"half_{i}", (hidden[i],), run) for i, run in enumerate(runs))
        results = run_in_turns((first, second))
    loads = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *[load for _, load in results])
    return [x for x, _ in results], KVPool(tuple(pages)), loads


def _half_stages(
    arch: Architecture,
    params: Params,
    pages: list[Array],
    half: Half,
    rope: tuple[Array, Array],
    sharding: LayerSharding,
    start: tuple[Array, ...],
) -> Stages[tuple[Float[Array, "T D"], ExpertLoad]]:
    """Layer by layer; writes the half's part of `pages`, layer after layer, in which it reads what a half ahead wrote."""
    (x,) = start
    loads = []
    may_sleep, following = has_store(params), [*params.layers[1:], None]
    staged: Staged | None = None  # of the layer at hand, fetched by the layer before
    for i, (layer, weights) in enumerate(zip(arch.layers, params.layers, strict=True)):
        with jax.named_scope("attention"):
            normed = rms_norm(x, weights.attention_norm, arch.rms_norm_eps).astype(
                weights.attention.w_qkv.dtype
            )
            q, k, v = project_qkv(arch, weights.attention, normed, *rope)
            attended, written = half.attend(layer, pages[i], q, k, v)
            if sharding.num_halves == 2:
                # Or XLA copies all pages, so that this half may read them after the other has written.
                attended, written = lax.optimization_barrier((attended, written))
            pages[i] = written
        (attended,) = yield Meeting((attended,))
        with jax.named_scope("attention"):
            x = x + project_out(weights.attention, attended, sharding)
        if may_sleep:
            mixed, load, staged = _part_resident_ffn(arch, weights, following[i], x, half, staged)
        else:
            share = params.balance_weight
            mixed, load = yield from _ffn_stages(arch, weights, x, half.tokens, half.is_real, sharding, share)
        x = x + mixed
        loads.append(load)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *loads)


def _ffn_stages(
    arch: Architecture,
    weights: LayerParams,
    x: Float[Array, "T D"],
    tokens: Int[Array, " T"],
    is_real: Bool[Array, " T"],
    sharding: LayerSharding,
    balance_weight: Float[Array, ""] | None = None,
) -> Stages[tuple[Float[Array, "T D"], ExpertLoad]]:
    normed = rms_norm(x, weights.ffn_norm, arch.rms_norm_eps)
    if isinstance(weights.ffn, MoEParams):
        mixed, load = yield from moe_stages(
            weights.ffn,
            normed,
            is_real,
            routing=arch.routing,
            activation=arch.activation,
            exchange=sharding.exchange,
            tokens=tokens,
            balance_weight=balance_weight,
        )
        return sharding.add_up(mixed), load
    with jax.named_scope("dense_ffn"):
        mixed = dense_ffn(weights.ffn, normed.astype(weights.ffn.w_gate_up.dtype), arch.activation)
        return sharding.add_up(mixed), no_load(max(1, arch.num_experts))


def _part_resident_ffn(
    arch: Architecture,
    weights: LayerParams,
    after: LayerParams | None,
    x: Float[Array, "T D"],
    half: Half,
    staged: Staged | None,
) -> tuple[Float[Array, "T D"], ExpertLoad, Staged | None]:
    """As `_ffn_stages`, on one device, where experts may be asleep; and what was fetched ahead for the layer `after` this one.

    That layer's router sees what this layer's experts read: the residual stream lacks only what they and one attention
    will add.
    """
    if not isinstance(weights.ffn, MoEParams):
        mixed, _ = run_alone(_ffn_stages(arch, weights, x, half.tokens, half.is_real, ALONE))
        return mixed, no_load(max(1, arch.num_experts), has_store=True), None
    upcoming = None
    if after is not None and isinstance(after.ffn, MoEParams):
        foreseen = rms_norm(x, after.ffn_norm, arch.rms_norm_eps)
        upcoming = foresee(after.ffn, foreseen, half.is_real, arch.routing)
    return part_resident_layer(
        weights.ffn,
        rms_norm(x, weights.ffn_norm, arch.rms_norm_eps),
        half.is_real,
        routing=arch.routing,
        activation=arch.activation,
        tokens=half.tokens,
        staged=staged,
        upcoming=upcoming,
    )
