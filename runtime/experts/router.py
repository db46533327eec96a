"""The router: which experts each token goes to, and with which weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from runtime.model.architecture import Architecture


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """expert_ids: logical experts, best first. weights: float32, of the experts' outputs."""

    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def route(arch: Architecture, router: Float[Array, "E D"], x: Float[Array, "T D"]) -> Routing:
    """Softmax over all experts, then the top_k of them, rescaled to a sum of 1 where the model was trained so."""
    with jax.named_scope("router"):
        # Full float32: neighbouring logits are close, and another expert is another result.
        logits = jnp.einsum(
            "td,ed->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        weights, expert_ids = lax.top_k(jax.nn.softmax(logits, axis=-1), arch.top_k)
        if arch.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(expert_ids, weights)
