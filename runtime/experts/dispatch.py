"""Tokens to experts and back: sort (token, choice) pairs by expert, and combine what the experts return.

A pair is numbered token * k + choice. With k = 2, three experts, token 1 padding:

    expert_ids      [[2, 0], [1, 0], [0, 2]]
    pairs by expert  1 4 | | 0 5 | 2 3           groups 0, 1, 2, then padding
    group_sizes     [2, 0, 2]
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from runtime.experts.router import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """N = T * k pairs. pair_of_row: the pair that each sorted row holds; row_of_pair: its inverse.

    group_sizes: rows of each expert, real tokens only; rows past their sum are padding.
    """

    pair_of_row: Int[Array, " N"]
    row_of_pair: Int[Array, " N"]
    group_sizes: Int[Array, " E"]


def plan_dispatch(expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"], num_experts: int) -> Dispatch:
    """Sorts pairs by expert, within an expert by token; pairs of padding tokens go past the end."""
    return plan_pairs(jnp.where(is_real[:, None], expert_ids, num_experts).reshape(-1), num_experts)


def plan_pairs(experts: Int[Array, " N"], num_experts: int) -> Dispatch:
    """The same from the expert of each pair; `num_experts` stands for none."""
    num_pairs = experts.size
    if (num_experts + 1) * num_pairs >= 2**31:
        raise ValueError(f"{num_pairs} pairs times {num_experts} experts do not fit the 32-bit sort key")
    pairs = jnp.arange(num_pairs, dtype=jnp.int32)
    # Expert and pair in one key: sorting single integers is much cheaper than sorting pairs of arrays.
    pair_of_row = lax.sort(experts * num_pairs + pairs) % num_pairs
    _, row_of_pair = lax.sort((pair_of_row, pairs), num_keys=1)
    belongs = experts[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :]  # [N, E]
    return Dispatch(pair_of_row, row_of_pair, jnp.sum(belongs, axis=0, dtype=jnp.int32))


def plan_on_device(slots: Int[Array, "T k"], device: Int[Array, ""], slots_per_device: int) -> Dispatch:
    """The pairs whose physical slot, of all devices, lies on this device, by its own slots; others go past the end."""
    local = slots - device * slots_per_device
    is_here = (local >= 0) & (local < slots_per_device)
    return plan_pairs(jnp.where(is_here, local, slots_per_device).reshape(-1), slots_per_device)


def permute(dispatch: Dispatch, x: Float[Array, "T D"], top_k: int) -> Float[Array, "N D"]:
    """Each pair's token, sorted by expert."""
    return x[dispatch.pair_of_row // top_k]


def combine(dispatch: Dispatch, routing: Routing, y: Float[Array, "N D"]) -> Float[Array, "T D"]:
    """`weigh` with the router's weights. Padding tokens get zeros: their rows of y are zeros."""
    return weigh(dispatch, y, routing.weights)


def weigh(dispatch: Dispatch, y: Float[Array, "N D"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
    """The weighted sum of each token's pairs, in float32."""
    picked = y[dispatch.row_of_pair].reshape(*weights.shape, y.shape[-1]).astype(jnp.float32)
    return jnp.sum(picked * weights[:, :, None], axis=1)
