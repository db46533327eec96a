"""The router: which experts each token goes to, and with which weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.router.op import router as router_op
from pallas_kernels.router.spec import RouterSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """expert_ids: logical experts, best first. weights: float32, of the experts' outputs.

    counts: real tokens of each logical expert, which the balancer reads; None where nobody does.
    """

    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    counts: Int[Array, " E"] | None = None


def route(
    router: Float[Array, "E D"],
    x: Float[Array, "T D"],
    is_real: Bool[Array, " T"],
    spec: RouterSpec,
    *,
    bias: Float[Array, " E"] | None = None,
) -> Routing:
    """Logits in full float32, the rest by the op. bias: steers the choice of experts, not their weights."""
    with jax.named_scope("router"):
        # Full float32: neighbouring logits are close, and another expert is another result.
        logits = jnp.einsum(
            "td,ed->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        choice = router_op(logits, is_real, spec, bias=bias)
        return Routing(choice.expert_ids, choice.weights, choice.counts)
