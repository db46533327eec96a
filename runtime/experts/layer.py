"""The mixture-of-experts layer: router, dispatch, the experts' product, combine."""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from pallas_kernels.router.spec import RouterSpec
from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.router import route
from runtime.experts.weights import MoEParams


def moe_layer(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    *,
    routing: RouterSpec,
    activation: str,
) -> tuple[Float[Array, "T D"], Int[Array, " E"]]:
    """x in float32 to (result in float32, tokens of each expert). Padding tokens reach no expert and get zeros."""
    routed = route(params.router, x, is_real, routing, bias=params.router_bias)
    with jax.named_scope("dispatch"):
        dispatch = plan_dispatch(routed.expert_ids, is_real, params.router.shape[0])
        x_sorted = permute(dispatch, x.astype(params.w_gate_up.dtype), routing.top_k)
    with jax.named_scope("experts"):
        y = expert_mlp(x_sorted, params.w_gate_up, params.w_down, dispatch.group_sizes, activation=activation)
    with jax.named_scope("combine"):
        counts = dispatch.group_sizes if routed.counts is None else routed.counts
        return combine(dispatch, routed, y), counts
