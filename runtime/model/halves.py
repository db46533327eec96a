"""The two halves of a step, and their results back in the step's order. Where the cut lies is data: shapes never change."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from runtime.model.architecture import Architecture
from runtime.model.batch import DecodeBatch, PrefillBatch


def keys_of_linear_part(arch: Architecture) -> float:
    """Keys that cost as much to attend to as a token's projections: D * (2 Q + 2 K) products against 2 Q for each key."""
    return arch.hidden_size * (1 + arch.kv_size / arch.q_size)


def choose_cut(batch: PrefillBatch, page_size: int, linear_keys: float) -> Int[Array, ""]:
    """Where the flat layout is cut, so that both parts have as equal attention work as they can.

    A token's work is the keys that it attends to and `linear_keys` for its projections; windows are not counted. Each half
    has room for T / 2 places, so a full layout can be cut in its middle only; a rung's padding is what the cut moves in.
    """
    half = batch.tokens.shape[0] // 2
    end = jnp.max(jnp.where(batch.row_len > 0, batch.row_start + batch.row_len, 0))
    cuts = jnp.arange(0, half + 1, page_size, dtype=jnp.int32)  # [C]
    before = _work_before(batch, cuts, linear_keys)
    total = _work_before(batch, jnp.array([2 * half], jnp.int32), linear_keys)
    difference = jnp.where(cuts >= end - half, jnp.abs(2 * before - total), jnp.inf)
    return cuts[jnp.argmin(difference)]


def halve_prefill(batch: PrefillBatch, cut: Int[Array, ""]) -> tuple[PrefillBatch, PrefillBatch]:
    """The flat places before and after the cut, which may cut one prompt: its second part then follows on its first.

    cut: at a page's border, so T must be an even number of pages. Rows that have nothing in a half have length 0.
    """
    half = batch.tokens.shape[0] // 2
    in_first = jnp.clip(cut - batch.row_start, 0, batch.row_len)
    first = PrefillBatch(
        batch.tokens[:half], jnp.minimum(batch.row_start, half), in_first, batch.context_len, batch.page_table
    )
    second = PrefillBatch(
        lax.dynamic_slice_in_dim(batch.tokens, cut, half),
        jnp.clip(batch.row_start - cut, 0, half),
        batch.row_len - in_first,
        batch.context_len + in_first,
        batch.page_table,
    )
    return first, second


def join_prefill(
    first: Float[Array, "H D"], second: Float[Array, "H D"], cut: Int[Array, ""]
) -> Float[Array, "T D"]:
    """Hidden states of the halves at their places in the flat layout."""
    return lax.dynamic_update_slice_in_dim(
        jnp.concatenate([first, jnp.zeros_like(first)]), second, cut, axis=0
    )


def halve_decode(batch: DecodeBatch) -> tuple[DecodeBatch, DecodeBatch]:
    """Every other row: a rung that is not full has its rows in front, and both halves get as many."""
    first, second = (jax.tree.map(lambda a, start=start: a[start::2], batch) for start in (0, 1))
    return first, second


def join_decode(first: Float[Array, "H D"], second: Float[Array, "H D"]) -> Float[Array, "B D"]:
    """Hidden states of the halves in the order of rows."""
    return jnp.stack([first, second], axis=1).reshape(-1, first.shape[1])


def _work_before(batch: PrefillBatch, cuts: Int[Array, " C"], linear_keys: float) -> Float[Array, " C"]:
    start, length, context = (a[None, :] for a in (batch.row_start, batch.row_len, batch.context_len))
    num = jnp.clip(cuts[:, None] - start, 0, length).astype(jnp.float32)  # [C, R]
    return jnp.sum(num * (linear_keys + context + num / 2), axis=1)
