"""Where to cut a distribution: exact top-k, top-p and min-p thresholds without sorting the vocabulary.

Each cut is a threshold on the scaled logits and keeps every token at or above it, so tokens that tie at the
threshold stay together: the result depends on the values alone, never on their order. The order of the cuts is
vLLM's: min-p, then top-k among what is left, then top-p on what is left, renormalised.

Most thresholds lie among the first few candidates and come from one partial top-k. The rest are found by bisection
on the bits of the floats, one vectorised pass for each of 32 halvings, which XLA's CPU sort cannot match. Which way
a row takes depends on that row only, so a row's result does not depend on its neighbours.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NUM_CANDIDATES = 128  # a partial top-k of this size costs about as much as one pass over the vocabulary


def keep_threshold(
    scaled: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    needed: Bool[Array, " B"],
) -> Float[Array, " B"]:
    """Smallest logit that each row keeps, given logits that are divided by temperature and have maximum 0.

    top_k 0 (or the vocabulary and more), top_p 1 and min_p 0 mean no cut. `needed` says whose answer matters: the
    slow way is taken only if one of them cannot do without. At least the largest logit is always kept.
    """
    num_tokens = scaled.shape[1]
    num_candidates = min(NUM_CANDIDATES, num_tokens)
    candidates = lax.top_k(scaled, num_candidates)[0]  # [B, K] descending
    limit = jnp.where((top_k <= 0) | (top_k >= num_tokens), num_tokens, top_k)
    cuts_k = limit < num_tokens
    k_is_near = ~cuts_k | (limit <= num_candidates)
    kth = jnp.take_along_axis(candidates, jnp.clip(limit - 1, 0, num_candidates - 1)[:, None], axis=1)[:, 0]
    floor = jnp.maximum(jnp.log(min_p), jnp.where(cuts_k & k_is_near, kth, -jnp.inf))

    weights = jnp.where(candidates >= floor[:, None], jnp.exp(candidates), 0.0)
    cumulative = jnp.cumsum(weights, axis=1)
    ends_inside = (candidates[:, -1] < floor) | (
        num_candidates == num_tokens
    )  # the candidates are all that is left
    kept = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0.0)  # [B, V], fused into the sum
    total = jnp.where(ends_inside, cumulative[:, -1], jnp.sum(kept, axis=1))
    reached = cumulative >= (top_p * total)[:, None]
    first = jnp.argmax(reached, axis=1)
    cuts_p = top_p < 1.0
    p_is_near = ~cuts_p | reached[:, -1]
    pth = jnp.take_along_axis(candidates, first[:, None], axis=1)[:, 0]
    near = jnp.where(cuts_p, jnp.maximum(pth, floor), floor)

    is_far = needed & ~(k_is_near & p_is_near)
    far = lax.cond(
        jnp.any(is_far),
        lambda: _far_threshold(scaled, limit, top_p, jnp.log(min_p), is_far),
        lambda: near,
    )
    return jnp.where(is_far, far, near)


def _far_threshold(
    scaled: Float[Array, "B V"],
    limit: Int[Array, " B"],
    top_p: Float[Array, " B"],
    floor: Float[Array, " B"],
    is_far: Bool[Array, " B"],
) -> Float[Array, " B"]:
    """The same by bisection: the largest value that keeps `limit` tokens, then the largest that keeps top_p of them."""
    order = _ordered_bits(scaled)  # [B, V]
    lowest = jnp.min(order, axis=1)
    above_all = jnp.ones_like(lowest)  # the bits of 0, the maximum, are 0

    def keeps_limit(middle: Int[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum((order >= middle[:, None]).astype(jnp.int32), axis=1) >= limit

    cuts_k = is_far & (limit < scaled.shape[1])
    kth = _bisect(keeps_limit, jnp.where(cuts_k, lowest, above_all - 1), above_all)
    floor = jnp.where(cuts_k, jnp.maximum(floor, kth), floor)

    # A float sum of fewer non-negative terms in the same order is never larger, so bisection on it is sound.
    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0.0)
    enough = top_p * jnp.sum(weights, axis=1)

    def keeps_mass(middle: Int[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum(jnp.where(order >= middle[:, None], weights, 0.0), axis=1) >= enough

    cuts_p = is_far & (top_p < 1.0)
    pth = _bisect(keeps_mass, jnp.where(cuts_p, lowest, above_all - 1), above_all)
    return jnp.where(cuts_p, jnp.maximum(floor, pth), floor)


def _bisect(
    holds: Callable[[Int[Array, " B"]], Bool[Array, " B"]], low: Int[Array, " B"], high: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Largest float in [low, high), both ordered bits, for which `holds`; it must hold at low and not at high."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without the overflow of low + high
        is_kept = holds(middle)
        inside = high > low + 1
        return jnp.where(inside & is_kept, middle, low), jnp.where(inside & ~is_kept, middle, high)

    low, _ = lax.while_loop(lambda bounds: jnp.any(bounds[1] > bounds[0] + 1), halve, (low, high))
    return lax.bitcast_convert_type(_flip_negative(low), jnp.float32)


def _ordered_bits(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """int32 that order like the floats."""
    return _flip_negative(lax.bitcast_convert_type(x, jnp.int32))


def _flip_negative(bits: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Floats of the same sign order like their bits when positive and the other way round when negative."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
