"""The mixture-of-experts layer: router, dispatch, the experts' product, combine."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from pallas_kernels.router.spec import RouterSpec
from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.exchange import exchange_tokens
from runtime.experts.exchange_spec import Exchange
from runtime.experts.residency import AsleepColumn
from runtime.experts.router import Routing, route
from runtime.experts.routing_table import look_up
from runtime.experts.sharing import CopyTable
from runtime.experts.stages import Stages, run_alone
from runtime.experts.weights import MoEParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertLoad:
    """What a step asked of the experts. tokens: by logical expert, of this device's own tokens; rows: computed here.

    asleep: what was not resident, columns as in `runtime.experts.residency.AsleepColumn`; None where all are.
    """

    tokens: Int[Array, "*L E"]
    rows: Int[Array, "*L 1"]
    asleep: Int[Array, "*L 4"] | None = None


def no_load(num_experts: int, *layers: int, has_store: bool = False) -> ExpertLoad:
    """Of a step, or a layer, that asked nothing."""
    tokens, rows = jnp.zeros((*layers, num_experts), jnp.int32), jnp.zeros((*layers, 1), jnp.int32)
    return ExpertLoad(tokens, rows, jnp.zeros((*layers, len(AsleepColumn)), jnp.int32) if has_store else None)


def moe_layer(
    params: MoEParams, x: Float[Array, "T D"], is_real: Bool[Array, " T"], **options: Any
) -> tuple[Float[Array, "T D"], ExpertLoad]:
    """`moe_stages` from beginning to end."""
    return run_alone(moe_stages(params, x, is_real, **options))


def moe_stages(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    *,
    routing: RouterSpec,
    activation: str,
    exchange: Exchange | None = None,
    tokens: Int[Array, " T"] | None = None,
    balance_weight: Float[Array, ""] | None = None,
) -> Stages[tuple[Float[Array, "T D"], ExpertLoad]]:
    """x in float32 to (result in float32, load), with a stage before, between and after the exchanges of `all_to_all`.

    Padding tokens reach no expert and get zeros.

    exchange: where the experts are shared by several devices; then this runs inside `shard_map`.
    tokens: their ids, which only a routing table asks for. balance_weight: expert_balance_weight, with an exchange only.
    """
    num_experts = params.router.shape[0]
    routed = choose_experts(params, x, is_real, routing, tokens)
    experts = partial(_experts, params, activation)
    if exchange is not None:
        assert balance_weight is not None
        slots_here, sent = params.w_gate_up.shape[0], x.astype(params.w_gate_up.dtype)
        copies = CopyTable(params.copies, balance_weight, slots_here * exchange.num_devices)
        counts = count_tokens(routed, is_real, num_experts)
        out, num_rows = yield from exchange_tokens(
            exchange, sent, routed, copies, is_real, experts, slots_here
        )
        return out, ExpertLoad(counts, num_rows[None])
    with jax.named_scope("dispatch"):
        dispatch = plan_dispatch(routed.expert_ids, is_real, num_experts)
        x_sorted = permute(dispatch, x.astype(params.w_gate_up.dtype), routing.top_k)
    with jax.named_scope("experts"):
        y = experts(x_sorted, dispatch.group_sizes)
    with jax.named_scope("combine"):
        counts = dispatch.group_sizes if routed.counts is None else routed.counts
        return combine(dispatch, routed, y), ExpertLoad(counts, count_rows(is_real, routing))


def choose_experts(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    routing: RouterSpec,
    tokens: Int[Array, " T"] | None,
) -> Routing:
    """The layer's routing: its router's, or its routing table's for tokens that this knows."""
    routed = route(params.router, x, is_real, routing, bias=params.router_bias)
    if params.routing_table is None or tokens is None:
        return routed
    with jax.named_scope("router"):
        return look_up(params.routing_table, tokens, is_real, routed, params.router.shape[0])


def _experts(params: MoEParams, activation: str, x_sorted: Array, group_sizes: Array) -> Array:
    return expert_mlp(x_sorted, params.w_gate_up, params.w_down, group_sizes, activation=activation)


def count_rows(is_real: Bool[Array, " T"], routing: RouterSpec) -> Int[Array, " 1"]:
    """Rows of the experts' products where one device computes all. Not the sum of the counts by expert: XLA would count
    every token a second time for it."""
    return jnp.sum(is_real, keepdims=True, dtype=jnp.int32) * routing.top_k


def count_tokens(routing: Routing, is_real: Bool[Array, " T"], num_experts: int) -> Int[Array, " E"]:
    """Real tokens of each expert."""
    if routing.counts is not None:
        return routing.counts
    ids = jnp.where(is_real[:, None], routing.expert_ids, num_experts).reshape(-1)
    return jnp.sum(ids[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
