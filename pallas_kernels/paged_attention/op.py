"""Decode attention over pages: checks and the choice of backend."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.paged_attention.checks import check_pages, check_row_values
from pallas_kernels.paged_attention.kernel import paged_attention_mosaic
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tiles import unfit_for_mosaic
from pallas_kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = {
    "mosaic": paged_attention_mosaic,
    "xla": paged_attention_xla,
    "reference": paged_attention_reference,
}


def paged_attention(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> Float[Array, "B H Dh"]:
    """One query a row, at position kv_len - 1, over keys [0, kv_len) of its row; scores are scaled by Dh ** -0.5.

    pages: [:, 0] keys, [:, 1] values; heads h * (H / K) and on share kv head h. Places that no row may see may hold NaN.
    page_table: ids of each row's pages from its position 0 on, at least those that kv_len covers.
    kv_len: keys of each row, its own token's included, at most P * S. Rows with 0 come back as zeros.
    window: the query sees the last `window` keys, itself included; None for all.
    sinks: a score for each head that joins the softmax without a value (gpt-oss).
    soft_cap: scores become soft_cap * tanh(score / soft_cap) before the mask (gemma).
    backend: a name of `IMPLEMENTATIONS`; by default the best that runs here.
    """
    check_pages(q, pages, page_table, window=window, sinks=sinks, soft_cap=soft_cap)
    check_row_values(q.shape[0], {"kv_len": kv_len})
    if page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, q {q.shape[0]}")
    name = choose_paged_attention(q, pages, backend).name
    with jax.named_scope("paged_attention"):
        return IMPLEMENTATIONS[name](
            q, pages, page_table, kv_len, window=window, sinks=sinks, soft_cap=soft_cap
        )


def choose_paged_attention(
    q: jax.Array | jax.ShapeDtypeStruct, pages: jax.Array | jax.ShapeDtypeStruct, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit_for_mosaic(q, pages))
