"""The mixture-of-experts layer: router, dispatch, the experts' product, combine."""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.router import route
from runtime.experts.weights import MoEParams


def moe_layer(
    params: MoEParams,
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    activation: str,
) -> tuple[Float[Array, "T D"], Int[Array, " E"]]:
    """x in float32 to (result in float32, tokens of each expert). Padding tokens reach no expert and get zeros."""
    routing = route(params.router, x, top_k=top_k, norm_topk_prob=norm_topk_prob)
    with jax.named_scope("dispatch"):
        dispatch = plan_dispatch(routing.expert_ids, is_real, params.router.shape[0])
        x_sorted = permute(dispatch, x.astype(params.w_gate_up.dtype), top_k)
    with jax.named_scope("experts"):
        y = expert_mlp(x_sorted, params.w_gate_up, params.w_down, dispatch.group_sizes, activation=activation)
    with jax.named_scope("combine"):
        return combine(dispatch, routing, y), dispatch.group_sizes
