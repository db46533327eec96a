"""Dense and obviously right: every expert multiplies every row, each row keeps the one it belongs to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def expert_mlp_reference(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    activation: str,
) -> Float[Array, "N D"]:
    """The op for tests: costs E times too much and reads every expert."""
    num_rows, num_experts = x_sorted.shape[0], group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    expert_of_row = jnp.searchsorted(ends, jnp.arange(num_rows), side="right")  # num_experts for padding
    x = x_sorted.astype(jnp.float32)
    gate_up = jnp.einsum("nd,efd->enf", x, w_gate_up.astype(jnp.float32))
    gate, up = jnp.split(gate_up, 2, axis=-1)
    # The activation between the two products is rounded to the input's type, as every backend does.
    hidden = (ACTIVATIONS[activation](gate) * up).astype(x_sorted.dtype).astype(jnp.float32)
    per_expert = jnp.einsum("enf,edf->end", hidden, w_down.astype(jnp.float32))
    belongs = jnp.arange(num_experts)[:, None] == expert_of_row[None, :]  # [E, N]
    return jnp.sum(jnp.where(belongs[:, :, None], per_expert, 0.0), axis=0).astype(x_sorted.dtype)
