"""The product in float32, written once."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def linear_reference(x: Float[Array, "B D"], w: Float[Array, "O D"]) -> Float[Array, "B O"]:
    """For tests: everything in float32, also the result."""
    return x.astype(jnp.float32) @ w.astype(jnp.float32).T
