"""The small parts that all layers share: norm, rotary embedding, dense feed-forward. Pure functions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear.op import linear
from runtime.model.params import DenseParams
from runtime.model.rope import RopeSpec

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """x over its root mean square, times `weight`; in float32, because bf16 has eight bits for the mean square."""
    with jax.named_scope("rms_norm"):
        x = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rope_tables(
    rope: RopeSpec, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T 1 C"], Float[Array, "T 1 C"]]:
    """cos and sin of every position's angles, C = head_dim / 2, in float32 because positions reach 10^5."""
    inv_freq = jnp.asarray(rope.inv_freq, jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * inv_freq[None, None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "T H Dh"], cos: Float[Array, "T 1 C"], sin: Float[Array, "T 1 C"]
) -> Float[Array, "T H Dh"]:
    """Turns the pair (channel c, channel c + Dh / 2) of each head by its angle."""
    with jax.named_scope("rope"):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def dense_ffn(params: DenseParams, x: Float[Array, "T D"], activation: str) -> Float[Array, "T D"]:
    """down(act(gate x) * up x)."""
    gate, up = jnp.split(linear(x, params.w_gate_up, out_dtype=jnp.float32), 2, axis=-1)
    return linear((ACTIVATIONS[activation](gate) * up).astype(x.dtype), params.w_down, out_dtype=jnp.float32)
