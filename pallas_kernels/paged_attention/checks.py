"""What both attention ops require of their operands."""

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array


def check_pages(
    q: Array,
    pages: Array,
    page_table: Array,
    *,
    window: int | None,
    sinks: Array | None,
    soft_cap: float | None,
) -> None:
    """Raises ValueError with the operand's name, what it is and what it must be."""
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}, expected three axes: tokens or rows, heads, channels")
    num_heads, head_dim = q.shape[1:]
    if pages.ndim != 5 or pages.shape[1] != 2 or pages.shape[4] != head_dim:
        raise ValueError(
            f"pages has shape {pages.shape}, expected [pages, 2, kv heads, page size, {head_dim}], the last as in q"
        )
    if num_heads % pages.shape[2]:
        raise ValueError(f"q has {num_heads} heads, no multiple of the {pages.shape[2]} kv heads of pages")
    if page_table.ndim != 2 or not jnp.issubdtype(page_table.dtype, jnp.integer):
        raise ValueError(
            f"page_table is {page_table.dtype}{page_table.shape}, expected int32[rows, pages a row]"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1 or None")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}, expected a positive number or None")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, expected {(num_heads,)}, one for each head of q")


def check_row_values(num_rows: int, values: Mapping[str, Array]) -> None:
    """Raises ValueError unless each holds one integer a row."""
    for name, value in values.items():
        if value.shape != (num_rows,) or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                f"{name} is {value.dtype}{value.shape}, expected int32({num_rows},), one for each row"
            )
