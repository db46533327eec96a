"""PrefillBatch and DecodeBatch: what one step computes, as arrays of fixed shape; and where each token belongs.

Prefill is flat: the chunks of all rows lie one after another in T tokens, each starting at a multiple of the page
size, so that whole pages are written. Four rows of which the last is padding, page size 4, T = 16:

    flat        0 1 2 3 | 4 5 6 7 | 8 9 . . | 12 . . .
    row         0 0 0 0 | 0 0 0 0 | 1 1     | 2
    row_start = [0, 8, 12, 16], row_len = [8, 2, 1, 0]
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from runtime.cache.kv_pool import DUMMY_PAGE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts.

    tokens: token ids; padding holds any valid id.
    row_start: flat place of each row's chunk, ascending, a multiple of the page size; T for padding rows.
    row_len: tokens of the chunk; 0 for padding rows.
    context_len: tokens of the row that are already in its pages, a multiple of the page size.
    page_table: page ids of each row from its position 0 on, those of the chunk included; the rest is the dummy page.
    """

    tokens: Int[Array, " T"]
    row_start: Int[Array, " R"]
    row_len: Int[Array, " R"]
    context_len: Int[Array, " R"]
    page_table: Int[Array, "R P"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """One token a row.

    positions: index of the token in its sequence.
    active: False for padding rows, which write to the dummy page, reach no expert and come back as garbage.
    page_table: as in PrefillBatch; it covers the token's own position.
    """

    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    active: Bool[Array, " B"]
    page_table: Int[Array, "B P"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPlaces:
    """For each flat place: its row, its position in the sequence (0 for padding), and whether a token is there."""

    row: Int[Array, " T"]
    position: Int[Array, " T"]
    is_real: Bool[Array, " T"]


def locate_tokens(batch: PrefillBatch, stride: int = 1) -> TokenPlaces:
    """TokenPlaces of the flat places 0, stride, 2 * stride, ..."""
    flat = jnp.arange(0, batch.tokens.shape[0], stride, dtype=jnp.int32)
    starts_before = batch.row_start[None, :] <= flat[:, None]  # [T, R]
    row = jnp.sum(starts_before, axis=1, dtype=jnp.int32) - 1
    has_row, row = row >= 0, jnp.maximum(row, 0)
    offset = flat - batch.row_start[row]
    is_real = has_row & (offset < batch.row_len[row])
    return TokenPlaces(row, jnp.where(is_real, batch.context_len[row] + offset, 0), is_real)


def prefill_page_ids(batch: PrefillBatch, page_size: int) -> Int[Array, " M"]:
    """The page that each page-sized piece of the flat layout goes to; the dummy page for pieces of padding only."""
    places = locate_tokens(batch, stride=page_size)
    page_ids = batch.page_table[places.row, places.position // page_size]
    return jnp.where(places.is_real, page_ids, DUMMY_PAGE)


def decode_page_ids(batch: DecodeBatch, page_size: int) -> Int[Array, " B"]:
    """The page that each row's token goes to; the dummy page for padding rows."""
    column = jnp.where(batch.active, batch.positions // page_size, 0)
    page_ids = jnp.take_along_axis(batch.page_table, column[:, None], axis=1)[:, 0]
    return jnp.where(batch.active, page_ids, DUMMY_PAGE)
