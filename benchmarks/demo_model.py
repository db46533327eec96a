"""The demo model's architecture as flax modules: Qwen3-MoE (grouped queries, q and k norms, top-k routing, tied embedding).

Written for training on a CPU: every expert multiplies a fixed number of gathered rows in one batched product, so a step costs
the active parameters only. Rows beyond an expert's capacity are dropped; a capacity factor of num_experts / top_k drops none.
Serving has its own implementation and shares only the weights with this one.
"""

from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def normal(scale: float) -> nn.initializers.Initializer:
    return nn.initializers.normal(scale)


@jax.custom_vjp
def gather_rows(x: jax.Array, rows: jax.Array, users: jax.Array) -> jax.Array:
    """x[rows], where `users` [num_rows, k] lists the places that read each row (len(rows) where there is none).

    The inverse map turns the gradient into a gather as well; a scatter-add is several times slower on a CPU.
    """
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _gather_rows_forward(x: jax.Array, rows: jax.Array, users: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gather_rows(x, rows, users), users


def _gather_rows_backward(users: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.take(gradient, users, axis=0, mode="fill", fill_value=0).sum(1), None, None


gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)  # the mean square needs more than bf16's eight bits
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps) * weight).astype(
            x.dtype
        )


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        c = self.config
        batch, length, _ = x.shape

        def project(name: str, width: int) -> jax.Array:
            weight = self.param(name, normal(0.02), (c.hidden_size, width), jnp.float32)
            return x @ weight.astype(x.dtype)

        q = project("q_proj", c.num_heads * c.head_dim).reshape(batch, length, c.num_heads, c.head_dim)
        k = project("k_proj", c.num_kv_heads * c.head_dim).reshape(batch, length, c.num_kv_heads, c.head_dim)
        v = project("v_proj", c.num_kv_heads * c.head_dim).reshape(batch, length, c.num_kv_heads, c.head_dim)
        q = rotate(RMSNorm(c.rms_norm_eps, name="q_norm")(q), cos, sin) * c.head_dim**-0.5
        k = rotate(RMSNorm(c.rms_norm_eps, name="k_norm")(k), cos, sin)
        group = c.num_heads // c.num_kv_heads
        q = q.reshape(batch, length, c.num_kv_heads, group, c.head_dim).transpose(0, 2, 3, 1, 4)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        q = q.reshape(batch, c.num_kv_heads, group * length, c.head_dim)
        scores = jnp.einsum("bkqd,bksd->bkqs", q, k, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, c.num_kv_heads, group, length, length)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1).astype(x.dtype)
        mixed = jnp.einsum(
            "bkqs,bksd->bkqd", weights.reshape(batch, c.num_kv_heads, group * length, length), v
        )
        mixed = mixed.reshape(batch, c.num_kv_heads, group, length, c.head_dim).transpose(0, 3, 1, 2, 4)
        weight = self.param("o_proj", normal(0.01), (c.num_heads * c.head_dim, c.hidden_size), jnp.float32)
        return mixed.reshape(batch, length, c.num_heads * c.head_dim) @ weight.astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    return (x * cos + jnp.concatenate([-second, first], -1) * sin).astype(x.dtype)


class Experts(nn.Module):
    config: ModelConfig
    capacity_factor: float

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, D] to (result [T, D], balance loss, fraction of the choices that each expert got [E])."""
        c = self.config
        num_tokens, top_k = x.shape[0], c.num_experts_per_tok
        capacity = min(
            num_tokens, int(num_tokens * top_k / c.num_experts * self.capacity_factor + 7) // 8 * 8
        )
        router = self.param("router", normal(0.02), (c.hidden_size, c.num_experts), jnp.float32)
        gate = self.param(
            "gate_proj", normal(0.02), (c.num_experts, c.hidden_size, c.moe_intermediate_size), jnp.float32
        )
        up = self.param(
            "up_proj", normal(0.02), (c.num_experts, c.hidden_size, c.moe_intermediate_size), jnp.float32
        )
        down = self.param(
            "down_proj", normal(0.01), (c.num_experts, c.moe_intermediate_size, c.hidden_size), jnp.float32
        )

        logits = x.astype(jnp.float32) @ router  # routing is decided in f32: near ties are common
        probabilities = jax.nn.softmax(logits, -1)
        shares, chosen = jax.lax.top_k(probabilities, top_k)  # [T, K]
        shares = shares / shares.sum(-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen.reshape(-1), c.num_experts, dtype=jnp.int32)  # [T * K, E]
        load = one_hot.sum(0) / (num_tokens * top_k)
        balance = c.num_experts * jnp.sum(load * probabilities.mean(0))

        # Each choice's place in its expert's queue; a full queue sends it to slot E * C, which holds nothing.
        queue = (jnp.cumsum(one_hot, 0) * one_hot).sum(-1) - 1
        num_slots = c.num_experts * capacity
        slots = jnp.where(queue < capacity, chosen.reshape(-1) * capacity + queue, num_slots)  # [T * K]
        choices = (
            jnp.full(num_slots + 1, num_tokens * top_k).at[slots].set(jnp.arange(num_tokens * top_k))[:-1]
        )
        rows = jnp.where(choices < num_tokens * top_k, choices // top_k, num_tokens)
        gathered = gather_rows(x, rows, slots.reshape(num_tokens, top_k)).reshape(c.num_experts, capacity, -1)
        hidden = nn.silu(gathered @ gate.astype(x.dtype)) * (gathered @ up.astype(x.dtype))
        out = (hidden @ down.astype(x.dtype)).reshape(num_slots, -1)
        picked = gather_rows(out, slots, choices[:, None]).reshape(num_tokens, top_k, -1)
        return (picked * shares[..., None].astype(x.dtype)).sum(1), balance, load


class Model(nn.Module):
    config: ModelConfig
    capacity_factor: float = 1.5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """tokens [B, T] to (logits [B, T, V], balance loss, expert load [layers, E])."""
        c = self.config
        batch, length = tokens.shape
        embedding = self.param("embed_tokens", normal(0.02), (c.vocab_size, c.hidden_size), jnp.float32)
        x = embedding[tokens].astype(self.dtype)
        frequencies = c.rope_theta ** (-jnp.arange(0, c.head_dim, 2) / c.head_dim)
        angles = jnp.arange(length)[:, None] * jnp.concatenate([frequencies, frequencies])
        cos, sin = jnp.cos(angles)[:, None].astype(self.dtype), jnp.sin(angles)[:, None].astype(self.dtype)
        balances, loads = [], []
        for i in range(c.num_layers):
            x = x + Attention(c, name=f"attention_{i}")(
                RMSNorm(c.rms_norm_eps, name=f"input_norm_{i}")(x), cos, sin
            )
            normed = RMSNorm(c.rms_norm_eps, name=f"post_norm_{i}")(x)
            mixed, balance, load = Experts(c, self.capacity_factor, name=f"experts_{i}")(
                normed.reshape(batch * length, -1)
            )
            x = x + mixed.reshape(x.shape)
            balances.append(balance)
            loads.append(load)
        x = RMSNorm(c.rms_norm_eps, name="norm")(x)
        return x @ embedding.T.astype(self.dtype), jnp.stack(balances).mean(), jnp.stack(loads)


def apply(model: Model, params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens [B, T] to (logits [B, T, V], balance loss, expert load [layers, E])."""
    return cast(tuple[jax.Array, jax.Array, jax.Array], model.apply({"params": params}, tokens))


def loss_of(model: Model, params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens [B, T + 1] to (mean cross entropy in nats, balance loss, expert load)."""
    logits, balance, load = apply(model, params, tokens[:, :-1])
    targets = tokens[:, 1:]
    wide = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(wide, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(wide, -1) - picked).mean(), balance, load
