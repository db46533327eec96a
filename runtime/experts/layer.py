"""The mixture-of-experts layer: router, dispatch, the experts' product, combine."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.exchange import Exchange, exchange_tokens
from runtime.experts.router import Routing, route
from runtime.experts.weights import MoEParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertLoad:
    """What a step asked of the experts. tokens: by logical expert, of this device's own tokens; rows: computed here."""

    tokens: Int[Array, "*L E"]
    rows: Int[Array, "*L 1"]


def no_load(num_experts: int, *layers: int) -> ExpertLoad:
    """Of a step, or a layer, that asked nothing."""
    return ExpertLoad(jnp.zeros((*layers, num_experts), jnp.int32), jnp.zeros((*layers, 1), jnp.int32))


def moe_layer(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    activation: str,
    exchange: Exchange | None = None,
) -> tuple[Float[Array, "T D"], ExpertLoad]:
    """x in float32 to (result in float32, load). Padding tokens reach no expert and get zeros.

    exchange: where the experts are shared by several devices; then this runs inside `shard_map`.
    """
    num_experts = params.router.shape[0]
    routing = route(params.router, x, top_k=top_k, norm_topk_prob=norm_topk_prob)
    experts = partial(_experts, params, activation)
    if exchange is not None:
        slots = choose_slots(params.copies, routing, exchange)
        sent = x.astype(params.w_gate_up.dtype)
        slots_here = params.w_gate_up.shape[0]
        out, num_rows = exchange_tokens(exchange, sent, routing, slots, is_real, experts, slots_here)
        return out, ExpertLoad(_count(routing, is_real, num_experts), num_rows[None])
    with jax.named_scope("dispatch"):
        dispatch = plan_dispatch(routing.expert_ids, is_real, num_experts)
        x_sorted = permute(dispatch, x.astype(params.w_gate_up.dtype), top_k)
    with jax.named_scope("experts"):
        y = experts(x_sorted, dispatch.group_sizes)
    with jax.named_scope("combine"):
        tokens = dispatch.group_sizes
        return combine(dispatch, routing, y), ExpertLoad(tokens, jnp.sum(tokens, keepdims=True))


def choose_slots(
    copies: Int[Array, "E R"], routing: Routing, exchange: Exchange
) -> Int[Array, "T k"]:
    """The physical slot of each (token, choice): rows of the step take the copies of an expert in turn.

    Rows are numbered across devices, so that steps of one row a device use all copies too.
    """
    row = jnp.arange(routing.expert_ids.shape[0], dtype=jnp.int32) * exchange.num_devices
    turn = (row + lax.axis_index(exchange.axis)) % copies.shape[1]
    return copies[routing.expert_ids, turn[:, None]]


def _experts(params: MoEParams, activation: str, x_sorted: Array, group_sizes: Array) -> Array:
    return expert_mlp(x_sorted, params.w_gate_up, params.w_down, group_sizes, activation=activation)


def _count(routing: Routing, is_real: Bool[Array, " T"], num_experts: int) -> Int[Array, " E"]:
    ids = jnp.where(is_real[:, None], routing.expert_ids, num_experts).reshape(-1)
    return jnp.sum(ids[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
