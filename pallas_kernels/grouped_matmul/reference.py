"""Dense and obviously right: every expert multiplies every row, each row keeps the one it belongs to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _clamped_swiglu(gate: Array, up: Array) -> Array:
    """What gpt-oss computes between its products, limit 7 and slope 1.702 as published; its biases are not added here."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


# (x @ gate.T, x @ up.T), both float32, to the hidden value
GATES = {
    "silu": lambda gate, up: gate * jax.nn.sigmoid(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped_swiglu": _clamped_swiglu,
}


def grouped_matmul_reference(
    x_sorted: Float[Array, "N K"],
    w: Float[Array, "E O K"],
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
) -> Float[Array, "N P"]:
    """The op for tests, in float32 until the last rounding: costs E times too much and reads every expert."""
    num_rows, num_experts = x_sorted.shape[0], group_sizes.shape[0]
    expert_of_row = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(num_rows), side="right")
    products = jnp.einsum("nk,eok->eno", x_sorted.astype(jnp.float32), w.astype(jnp.float32))
    if gate is not None:
        products = GATES[gate](*jnp.split(products, 2, axis=-1))
    belongs = jnp.arange(num_experts)[:, None] == expert_of_row[None, :]  # [E, N]; padding belongs to nobody
    return jnp.sum(jnp.where(belongs[:, :, None], products, 0.0), axis=0).astype(x_sorted.dtype)
