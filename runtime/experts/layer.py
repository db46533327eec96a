"""The mixture-of-experts layer: router, dispatch, the experts' product, combine."""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.expert_mlp.op import expert_mlp
from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.router import route
from runtime.model.architecture import Architecture
from runtime.model.params import MoEParams


def moe_layer(
    arch: Architecture, params: MoEParams, x: Float[Array, "T D"], is_real: Bool[Array, " T"]
) -> tuple[Float[Array, "T D"], Int[Array, " E"]]:
    """x in float32 to (result in float32, tokens that each expert got). Padding tokens reach no expert and get zeros."""
    routing = route(arch, params.router, x)
    with jax.named_scope("dispatch"):
        dispatch = plan_dispatch(routing.expert_ids, is_real, arch.num_experts)
        x_sorted = permute(dispatch, x.astype(params.w_gate_up.dtype), arch.top_k)
    with jax.named_scope("experts"):
        y = expert_mlp(
            x_sorted, params.w_gate_up, params.w_down, dispatch.group_sizes, activation=arch.activation
        )
    with jax.named_scope("combine"):
        return combine(dispatch, routing, y), dispatch.group_sizes
