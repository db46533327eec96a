"""Routing that was seen before instead of a router's: a table from token ids to experts, for one layer. Off by default.

A *fixed table* knows every token id that was ever seen; a *cache of frequent patterns* only those that nearly always went the
same way. Neither is exact: what a router sees is the token's context too. docs/kernels.md has what it costs and could save.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from runtime.experts.router import Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoutingTable:
    """expert_ids int32 and weights float32 [V, k]; is_known bool [V], False where the router decides."""

    expert_ids: Any
    weights: Any
    is_known: Any


@dataclass(frozen=True)
class SeenRouting:
    """What a router decided: token ids [N], experts [N, k] and weights [N, k], as numpy arrays."""

    tokens: np.ndarray
    expert_ids: np.ndarray
    weights: np.ndarray


def build_table(
    seen: SeenRouting, vocab_size: int, *, min_count: int = 1, min_share: float = 0.0
) -> RoutingTable:
    """Each token's most frequent set of experts, with the mean of its weights.

    min_count: how often a token must have been seen to be known. min_share: in what part of these with its most frequent set.
    The defaults make a fixed table. Raises ValueError for a token outside the vocabulary or a share outside [0, 1].
    """
    if not 0 <= min_share <= 1 or min_count < 1:
        raise ValueError(f"min_share is {min_share}, expected 0 to 1; min_count is {min_count}, at least 1")
    if len(seen.tokens) and not 0 <= seen.tokens.min() <= seen.tokens.max() < vocab_size:
        raise ValueError(
            f"a token is {seen.tokens.min()} or {seen.tokens.max()}, expected 0 to {vocab_size - 1}"
        )
    num_chosen = seen.expert_ids.shape[1]
    sets: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    sums: dict[tuple[int, tuple[int, ...]], np.ndarray] = defaultdict(lambda: np.zeros(num_chosen))
    order = np.argsort(seen.expert_ids, axis=1, kind="stable")
    ids = np.take_along_axis(seen.expert_ids, order, axis=1)
    weights = np.take_along_axis(seen.weights, order, axis=1)
    for token, experts, weight in zip(seen.tokens.tolist(), map(tuple, ids.tolist()), weights, strict=True):
        sets[token][experts] += 1
        sums[token, experts] += weight
    table = RoutingTable(
        np.zeros((vocab_size, num_chosen), np.int32),
        np.zeros((vocab_size, num_chosen), np.float32),
        np.zeros(vocab_size, np.bool_),
    )
    for token, counts in sets.items():
        experts, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        if counts.total() >= min_count and count >= min_share * counts.total():
            table.expert_ids[token], table.weights[token] = experts, sums[token, experts] / count
            table.is_known[token] = True
    return jax.tree.map(jnp.asarray, table)


def look_up(
    table: RoutingTable,
    tokens: Int[Array, " T"],
    is_real: Bool[Array, " T"],
    routing: Routing,
    num_experts: int,
) -> Routing:
    """The table's experts and weights for the tokens that it knows, the router's for the others."""
    is_known = table.is_known[tokens][:, None]
    expert_ids = jnp.where(is_known, table.expert_ids[tokens], routing.expert_ids)
    weights = jnp.where(is_known, table.weights[tokens], routing.weights)
    real_ids = jnp.where(is_real[:, None], expert_ids, num_experts).reshape(-1)
    belongs = real_ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    return Routing(expert_ids, weights, jnp.sum(belongs, axis=0, dtype=jnp.int32))
