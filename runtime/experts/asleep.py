"""The expert layer where only some experts are resident: the others' weights are fetched from the host's memory in the step.

Rows are sorted by slot, then, for experts without one, by expert. The product over the slots is the usual one. Then a loop
takes the asleep experts that have rows, one after another: it fetches the weights, or takes what the layer before fetched
ahead, and writes the rows into the same result, so that `combine` and its order of sums are those of any layer. No row is
dropped, however many experts are asleep, and residency is data: it compiles nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from pallas_kernels.router.spec import RouterSpec
from runtime.experts.dispatch import Dispatch, combine, permute, plan_dispatch
from runtime.experts.layer import ExpertLoad, choose_experts, count_rows, count_tokens
from runtime.experts.router import route
from runtime.experts.weights import ExpertStore, MoEParams

MIN_BLOCK_ROWS = 16

type Weights = tuple[Array, Array]  # of one expert: [2 F, D] and [D, F]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Staged:
    """Asleep experts of a layer that were fetched ahead. expert_ids: int32 [P], -1 for none; weights: of each."""

    expert_ids: Any
    weights: tuple[Weights, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Upcoming:
    """What this layer shall fetch for the next one. expert_ids: int32 [P], -1 for none."""

    store: ExpertStore
    expert_ids: Any


def foresee(
    params: MoEParams, x: Float[Array, "T D"], is_real: Bool[Array, " T"], routing: RouterSpec
) -> Upcoming | None:
    """The asleep experts that the next layer will most likely want. params: the next layer's; x: what is known now of
    its input, normalised by its own norm.
    """
    store = params.store
    if store is None or store.num_staged == 0:
        return None
    with jax.named_scope("router"):
        num_experts = params.router.shape[0]
        routed = route(params.router, x, is_real, routing, bias=params.router_bias)
        wanted = jnp.where(store.slot_of_expert < 0, count_tokens(routed, is_real, num_experts), 0)
        counts, experts = lax.top_k(wanted, store.num_staged)
        return Upcoming(store, jnp.where(counts > 0, experts, -1).astype(jnp.int32))


def part_resident_layer(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    *,
    routing: RouterSpec,
    activation: str,
    tokens: Int[Array, " T"] | None = None,
    staged: Staged | None = None,
    upcoming: Upcoming | None = None,
) -> tuple[Float[Array, "T D"], ExpertLoad, Staged | None]:
    """As `moe_layer` with all experts, and what was fetched for the next layer."""
    store, num_slots = params.store, params.w_gate_up.shape[0]
    num_experts = params.router.shape[0]
    routed = choose_experts(params, x, is_real, routing, tokens)
    with jax.named_scope("dispatch"):
        is_asleep = store.slot_of_expert < 0
        group_of_expert = jnp.where(
            is_asleep, num_slots + jnp.arange(num_experts, dtype=jnp.int32), store.slot_of_expert
        )
        dispatch = plan_dispatch(group_of_expert[routed.expert_ids], is_real, num_slots + num_experts)
        x = x.astype(params.w_gate_up.dtype)
        x_sorted = permute(dispatch, x, routing.top_k)
        counts = dispatch.group_sizes[group_of_expert]
    with jax.named_scope("experts"):
        in_slots = dispatch.group_sizes[:num_slots]
        product = partial(
            expert_mlp, x_sorted, params.w_gate_up, params.w_down, in_slots, activation=activation
        )
        y, fetched = _product_and_fetch(product, upcoming)
        y, late = _asleep_rows(store, dispatch, x_sorted, y, staged, num_slots, activation)
    with jax.named_scope("combine"):
        asleep_counts = jnp.where(is_asleep, counts, 0)
        used, unused = _judge(staged, asleep_counts)
        asleep = jnp.stack([jnp.sum(asleep_counts), used, unused, late - used]).astype(jnp.int32)
        load = ExpertLoad(counts, count_rows(is_real, routing), asleep)
        return combine(dispatch, routed, y), load, fetched


def fetch(store: ExpertStore, expert: Int[Array, ""]) -> Weights:
    """One expert's weights in the device's memory."""

    def one(w: Array) -> Array:
        part = lax.dynamic_index_in_dim(w, expert, keepdims=False)
        return jax.device_put(part, jax.memory.Space.Device)

    return one(store.w_gate_up), one(store.w_down)


def wake_expert(
    w_gate_up: Float[Array, "S F2 D"],
    w_down: Float[Array, "S D F"],
    store: ExpertStore,
    expert: Int[Array, ""],
    slot: Int[Array, ""],
) -> tuple[Float[Array, "S F2 D"], Float[Array, "S D F"]]:
    """The slots with an expert of the store copied into one of them; for donated slots, in place."""
    gate_up, down = fetch(store, expert)
    return (
        lax.dynamic_update_index_in_dim(w_gate_up, gate_up, slot, 0),
        lax.dynamic_update_index_in_dim(w_down, down, slot, 0),
    )


def _product_and_fetch(
    product: Callable[[], Array], upcoming: Upcoming | None
) -> tuple[Array, Staged | None]:
    """The product over the slots and, in the same branch, the copies for the next layer, so that a GPU may do both at once.

    Without anything to fetch the other branch runs: a copy that nobody needs would hold the bus.
    """
    if upcoming is None:
        return product(), None
    ids, store = upcoming.expert_ids, upcoming.store

    def with_fetch() -> tuple[Array, tuple[Weights, ...]]:
        return product(), tuple(fetch(store, jnp.maximum(ids[p], 0)) for p in range(store.num_staged))

    def without() -> tuple[Array, tuple[Weights, ...]]:
        nothing = (
            jnp.zeros(store.w_gate_up.shape[1:], store.w_gate_up.dtype),
            jnp.zeros(store.w_down.shape[1:], store.w_down.dtype),
        )
        return product(), (nothing,) * store.num_staged

    y, weights = lax.cond(jnp.any(ids >= 0), with_fetch, without)
    return y, Staged(ids, weights)


def _asleep_rows(
    store: ExpertStore,
    dispatch: Dispatch,
    x_sorted: Float[Array, "N D"],
    y: Float[Array, "N D"],
    staged: Staged | None,
    num_slots: int,
    activation: str,
) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
    """(y with the rows of the asleep experts written in, how many such experts there were)."""
    num_rows, num_experts = x_sorted.shape[0], store.slot_of_expert.shape[0]
    block = min(num_rows, max(MIN_BLOCK_ROWS, 4 * -(-num_rows // num_experts)))
    x_padded = jnp.pad(x_sorted, ((0, block), (0, 0)))
    first_row = (jnp.cumsum(dispatch.group_sizes) - dispatch.group_sizes)[num_slots:]
    sizes = dispatch.group_sizes[num_slots:]
    wanted_first = jnp.argsort(sizes == 0, stable=True)
    num_wanted = jnp.sum(sizes > 0, dtype=jnp.int32)

    def weights_of(expert: Array) -> Weights:
        if staged is None:
            return fetch(store, expert)
        num_staged = len(staged.weights)
        is_here = staged.expert_ids == expert
        place = jnp.where(jnp.any(is_here), jnp.argmax(is_here), num_staged)
        ahead = [lambda w=w: w for w in staged.weights]
        return lax.switch(place, [*ahead, lambda: fetch(store, expert)])

    def one_expert(i: Array, y: Array) -> Array:
        expert = wanted_first[i]
        gate_up, down = weights_of(expert)
        first, size = first_row[expert], sizes[expert]

        def one_block(j: Array, y: Array) -> Array:
            row, left = first + j * block, jnp.minimum(size - j * block, block)
            rows = lax.dynamic_slice_in_dim(x_padded, row, block)
            out = expert_mlp(rows, gate_up[None], down[None], left[None], activation=activation)
            places = jnp.arange(block, dtype=jnp.int32)
            return y.at[jnp.where(places < left, row + places, num_rows)].set(out, mode="drop")

        return lax.fori_loop(0, -(-size // block), one_block, y)

    return lax.fori_loop(0, num_wanted, one_expert, y), num_wanted


def _judge(staged: Staged | None, asleep_counts: Int[Array, " E"]) -> tuple[Array, Array]:
    """(fetched ahead and wanted, fetched ahead in vain)."""
    if staged is None:
        return jnp.int32(0), jnp.int32(0)
    is_staged = staged.expert_ids >= 0
    used = jnp.sum(is_staged & (asleep_counts[jnp.maximum(staged.expert_ids, 0)] > 0), dtype=jnp.int32)
    return used, jnp.sum(is_staged, dtype=jnp.int32) - used
