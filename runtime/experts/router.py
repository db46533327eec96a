"""The router: which experts each token goes to, and with which weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """expert_ids: logical experts, best first. weights: float32, of the experts' outputs."""

    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def route(
    router: Float[Array, "E D"], x: Float[Array, "T D"], *, top_k: int, norm_topk_prob: bool
) -> Routing:
    """Softmax over all experts, then the top_k of them, with `norm_topk_prob` rescaled to a sum of 1."""
    with jax.named_scope("router"):
        # Full float32: neighbouring logits are close, and another expert is another result.
        logits = jnp.einsum(
            "td,ed->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        weights, expert_ids = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
        if norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(expert_ids, weights)
