"""The router written for reading: whole sorts, one step a line."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.router.spec import RouterChoice, RouterSpec

TINY = 1e-20  # keeps a sum of sigmoids from being zero


def router_reference(
    logits: Float[Array, "T E"],
    is_real: Bool[Array, " T"],
    bias: Float[Array, " E"] | None,
    spec: RouterSpec,
) -> RouterChoice:
    """The op for tests, in float32. Ties go to the lower group and the lower expert."""
    num_tokens, num_experts = logits.shape
    scores = score(logits, spec)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if spec.is_grouped:
        by_group = choice.reshape(num_tokens, spec.num_groups, -1)
        group_score = jnp.sum(
            jnp.sort(by_group, axis=2, descending=True)[:, :, : spec.num_group_best], axis=2
        )
        order = jnp.argsort(group_score, axis=1, stable=True, descending=True)
        rank = jnp.argsort(order, axis=1)  # of each group, 0 for the best
        is_kept = jnp.repeat(rank < spec.num_kept_groups, num_experts // spec.num_groups, axis=1)
        choice = jnp.where(is_kept, choice, -jnp.inf)
    expert_ids = jnp.argsort(choice, axis=1, stable=True, descending=True)[:, : spec.top_k].astype(jnp.int32)
    weights = weigh(jnp.take_along_axis(scores, expert_ids, axis=1), spec)
    chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.int32) * is_real[:, None, None]
    return RouterChoice(weights, expert_ids, jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32))


def score(logits: Float[Array, "T E"], spec: RouterSpec) -> Float[Array, "T E"]:
    """float32 scores of all experts, before any bias."""
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if spec.score == "softmax" else jax.nn.sigmoid(logits)


def weigh(chosen: Float[Array, "T k"], spec: RouterSpec) -> Float[Array, "T k"]:
    """What the chosen experts' scores become: weights of their outputs."""
    if spec.renormalise:
        chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + TINY)
    return chosen if spec.scale == 1.0 else chosen * spec.scale
