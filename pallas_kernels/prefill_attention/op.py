"""Prefill attention over pages: checks and the choice of backend."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.paged_attention.checks import check_pages, check_row_values
from pallas_kernels.paged_attention.tiles import unfit_for_mosaic
from pallas_kernels.prefill_attention.kernel import prefill_attention_mosaic
from pallas_kernels.prefill_attention.reference import prefill_attention_reference
from pallas_kernels.prefill_attention.xla import prefill_attention_xla

IMPLEMENTATIONS = {
    "mosaic": prefill_attention_mosaic,
    "xla": prefill_attention_xla,
    "reference": prefill_attention_reference,
}


def prefill_attention(
    q: Float[Array, "T H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "R P"],
    row_start: Int[Array, " R"],
    row_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> Float[Array, "T H Dh"]:
    """Each token over its row's keys up to itself; the chunks' own keys must be in the pages already.

    row_start: flat place of each row's chunk, ascending, a multiple of the page size; T for padding rows, which are last.
    row_len: tokens of each row's chunk; 0 for padding rows.
    context_len: tokens of the row before the chunk, all in its pages.
    The other operands are those of `paged_attention`. Places without a token come back finite and mean nothing.
    """
    check_pages(q, pages, page_table, window=window, sinks=sinks, soft_cap=soft_cap)
    rows = {"row_start": row_start, "row_len": row_len, "context_len": context_len}
    check_row_values(page_table.shape[0], rows)
    name = choose_prefill_attention(q, pages, backend).name
    with jax.named_scope("prefill_attention"):
        return IMPLEMENTATIONS[name](
            q,
            pages,
            page_table,
            row_start,
            row_len,
            context_len,
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
        )


def choose_prefill_attention(
    q: jax.Array | jax.ShapeDtypeStruct, pages: jax.Array | jax.ShapeDtypeStruct, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit_for_mosaic(q, pages))
