"""The router by XLA: what the CPU runs, and GPUs without a kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.router.reference import score, weigh
from pallas_kernels.router.spec import RouterChoice, RouterSpec


def router_xla(
    logits: Float[Array, "T E"],
    is_real: Bool[Array, " T"],
    bias: Float[Array, " E"] | None,
    spec: RouterSpec,
) -> RouterChoice:
    """The op. `lax.top_k` prefers the lower index in a tie, for groups and experts alike."""
    num_experts = logits.shape[1]
    scores = score(logits, spec)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if spec.is_grouped:
        choice = jnp.where(_is_kept(choice, spec), choice, -jnp.inf)
    best, expert_ids = lax.top_k(choice, spec.top_k)
    chosen = best if bias is None else jnp.take_along_axis(scores, expert_ids, axis=1)
    experts = jnp.where(is_real[:, None], expert_ids, num_experts).reshape(-1)
    belongs = experts[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :]  # [T * k, E]
    counts = jnp.sum(belongs, axis=0, dtype=jnp.int32)
    return RouterChoice(weigh(chosen, spec), expert_ids, counts)


def _is_kept(choice: Float[Array, "T E"], spec: RouterSpec) -> Bool[Array, "T E"]:
    """Whether each expert's group is among the best of its token."""
    num_tokens, num_experts = choice.shape
    by_group = choice.reshape(num_tokens, spec.num_groups, -1)
    group_score = jnp.sum(lax.top_k(by_group, spec.num_group_best)[0], axis=-1)  # [T, G]
    kept = lax.top_k(group_score, spec.num_kept_groups)[1]  # [T, kept]
    group = jnp.arange(spec.num_groups, dtype=kept.dtype)
    is_kept = jnp.any(kept[:, :, None] == group[None, None, :], axis=1)  # [T, G]
    return jnp.repeat(is_kept, num_experts // spec.num_groups, axis=1)
