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
from runtime.experts.stages import Lane as StagedLane
from runtime.experts.stages import Meeting, Stages, run_alone, run_in_turns
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


class Lane(NamedTuple):
    """A micro-batch on its way through the layers; a step has one or two."""

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

    def lane(half: PrefillBatch) -> Lane:
        places = locate_tokens(half)
        page_ids = prefill_page_ids(half, page_size)

        def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            pages = write_pages(pages, k, v, page_ids)
            return attend_prefill(q, pages, half, layer.sliding_window), pages

        return Lane(half.tokens, places.position, places.is_real, attend)

    if sharding.num_halves == 1:
        (x,), pool, load = _forward(arch, params, pool, [lane(batch)], sharding)
        return x, pool, load
    cut = choose_cut(batch, page_size, keys_of_linear_part(arch))
    lanes = [lane(half) for half in halve_prefill(batch, cut)]
    (first, second), pool, load = _forward(arch, params, pool, lanes, sharding)
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

    def lane(half: DecodeBatch) -> Lane:
        positions = jnp.where(half.active, half.positions, 0)
        kv_len = jnp.where(half.active, half.positions + 1, 0)
        page_ids = decode_page_ids(half, page_size)

        def attend(layer: LayerKind, pages: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            pages = write_tokens(pages, k, v, page_ids, positions % page_size)
            return attend_decode(q, pages, half.page_table, kv_len, layer.sliding_window), pages

        return Lane(half.tokens, positions, half.active, attend)

    if sharding.num_halves == 1:
        (x,), pool, load = _forward(arch, params, pool, [lane(batch)], sharding)
        return x, pool, load
    (first, second), pool, load = _forward(
        arch, params, pool, [lane(h) for h in halve_decode(batch)], sharding
    )
    return join_decode(first, second), pool, load


def unembed(arch: Architecture, params: Params, hidden: Float[Array, "N D"]) -> Float[Array, "N V"]:
    """Final norm and logits, float32."""
    with jax.named_scope("unembed"):
        weight = params.embedding if params.unembedding is None else params.unembedding
        normed = rms_norm(hidden, params.final_norm, arch.rms_norm_eps).astype(weight.dtype)
        return linear(normed, weight, out_dtype=jnp.float32)


def _forward(
    arch: Architecture, params: Params, pool: KVPool, lanes: Sequence[Lane], sharding: LayerSharding
) -> tuple[list[Float[Array, "T D"]], KVPool, ExpertLoad]:
    """One lane to the end, or two in turns: a stage of one beside the exchange of the other (docs/expert_parallel.md)."""
    pages = list(pool.pages)
    with jax.named_scope("embed"):
        hidden = [params.embedding[lane.tokens].astype(jnp.float32) for lane in lanes]
        ropes = [rope_tables(arch.rope, lane.positions) for lane in lanes]
    runs = [
        partial(_lane_stages, arch, params, pages, lane, rope, sharding)
        for lane, rope in zip(lanes, ropes, strict=True)
    ]
    if len(lanes) == 1:
        results = [run_alone(runs[0]((hidden[0],)))]
    else:
        first, second = (StagedLane(f"half_{i}", (hidden[i],), run) for i, run in enumerate(runs))
        results = run_in_turns((first, second))
    loads = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *[load for _, load in results])
    return [x for x, _ in results], KVPool(tuple(pages)), loads


def _lane_stages(
    arch: Architecture,
    params: Params,
    pages: list[Array],
    lane: Lane,
    rope: tuple[Array, Array],
    sharding: LayerSharding,
    start: tuple[Array, ...],
) -> Stages[tuple[Float[Array, "T D"], ExpertLoad]]:
    """Layer by layer; writes the lane's part of `pages`, layer after layer, in which it reads what lanes ahead wrote."""
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
            attended, written = lane.attend(layer, pages[i], q, k, v)
            if sharding.num_halves == 2:
                # Or XLA copies all pages, so that this lane may read them after the other has written.
                attended, written = lax.optimization_barrier((attended, written))
            pages[i] = written
        (attended,) = yield Meeting((attended,))
        with jax.named_scope("attention"):
            x = x + project_out(weights.attention, attended, sharding)
        if may_sleep:
            mixed, load, staged = _part_resident_ffn(arch, weights, following[i], x, lane, staged)
        else:
            mixed, load = yield from _ffn_stages(arch, weights, x, lane.tokens, lane.is_real, sharding)
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
    lane: Lane,
    staged: Staged | None,
) -> tuple[Float[Array, "T D"], ExpertLoad, Staged | None]:
    """As `_ffn_stages`, on one device, where experts may be asleep; and what was fetched ahead for the layer `after` this one.

    That layer's router sees what this layer's experts read: the residual stream lacks only what they and one attention
    will add.
    """
    if not isinstance(weights.ffn, MoEParams):
        mixed, _ = run_alone(_ffn_stages(arch, weights, x, lane.tokens, lane.is_real, ALONE))
        return mixed, no_load(max(1, arch.num_experts), has_store=True), None
    upcoming = None
    if after is not None and isinstance(after.ffn, MoEParams):
        foreseen = rms_norm(x, after.ffn_norm, arch.rms_norm_eps)
        upcoming = foresee(after.ffn, foreseen, lane.is_real, arch.routing)
    return part_resident_layer(
        weights.ffn,
        rms_norm(x, weights.ffn_norm, arch.rms_norm_eps),
        lane.is_real,
        routing=arch.routing,
        activation=arch.activation,
        tokens=lane.tokens,
        staged=staged,
        upcoming=upcoming,
    )
