"""Absorbed latent attention over pages: checks and the choice of backend."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.mla_attention.kernel import mla_attention_mosaic, unfit_for_mosaic
from pallas_kernels.mla_attention.reference import mla_attention_reference
from pallas_kernels.mla_attention.xla import mla_attention_xla
from pallas_kernels.paged_attention.checks import check_row_values

IMPLEMENTATIONS = {
    "mosaic": mla_attention_mosaic,
    "xla": mla_attention_xla,
    "reference": mla_attention_reference,
}


def mla_attention(
    q: Float[Array, "B H CR"],
    pages: Float[Array, "N S CR"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    num_latent: int,
    scale: float,
    backend: str | None = None,
) -> Float[Array, "B H C"]:
    """One query a row, at position kv_len - 1, over latents [0, kv_len) of its row, which all heads share.

    q: each head's query in the space of the latent (its part without positions times the up-projection of keys), then
        its rotary part.
    pages: the latent of each token, C = num_latent channels, then its rotary key. Places that no row may see may hold NaN.
    kv_len: keys of each row, its own token's included, at most P * S. Rows with 0 come back as zeros.
    scale: of the scores; that of the model's own head size, which the absorbed form does not show.
    Returns the mixed latent; the up-projection of values is the caller's.
    backend: a name of `IMPLEMENTATIONS`; by default the best that runs here.
    """
    _check(q, pages, page_table, num_latent, scale)
    check_row_values(q.shape[0], {"kv_len": kv_len})
    name = choose_mla_attention(pages, num_latent, backend).name
    with jax.named_scope("mla_attention"):
        return IMPLEMENTATIONS[name](q, pages, page_table, kv_len, num_latent=num_latent, scale=scale)


def choose_mla_attention(
    pages: Array | jax.ShapeDtypeStruct, num_latent: int, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    reason = unfit_for_mosaic(pages, num_latent)
    unfit: Mapping[str, str] = {} if reason is None else {"mosaic": reason}
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit)


def _check(q: Array, pages: Array, page_table: Array, num_latent: int, scale: float) -> None:
    if q.ndim != 3 or pages.ndim != 3 or q.shape[2] != pages.shape[2]:
        raise ValueError(
            f"q has shape {q.shape}, pages {pages.shape}: expected [rows, heads, channels] and "
            "[pages, page size, channels] with the same channels"
        )
    if not 1 <= num_latent <= q.shape[2]:
        raise ValueError(f"num_latent is {num_latent}, expected 1 to {q.shape[2]}, the channels of q")
    if page_table.ndim != 2 or not jnp.issubdtype(page_table.dtype, jnp.integer):
        raise ValueError(
            f"page_table is {page_table.dtype}{page_table.shape}, expected int32[rows, pages a row]"
        )
    if page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, q {q.shape[0]}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}, expected a positive number")
