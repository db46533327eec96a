"""The named cases that test, ahead-of-time build and benchmark share: tiny ones, the extremes, and shapes of real models."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.paged_attention.cases import MODEL_SHAPES, ModelShape, poisoned_pages
from pallas_kernels.paged_attention.cases import Case as DecodeCase
from pallas_kernels.prefill_attention.kernel import prefill_attention_mosaic


@dataclass(frozen=True)
class Case:
    """One call of the op: chunks in order, 0 for padding rows, over contexts; `num_tokens` flat places."""

    name: str
    row_len: tuple[int, ...]
    context_len: tuple[int, ...]
    num_tokens: int
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 64
    pages_a_row: int = 4
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"

    @property
    def row_start(self) -> tuple[int, ...]:
        """Chunks start at whole pages; padding rows, which are last, past all places."""
        starts, place = [], 0
        for length in self.row_len:
            starts.append(place if length else self.num_tokens)
            place += -(-length // self.page_size) * self.page_size
        return tuple(starts)


CASES: tuple[Case, ...] = (
    Case("one token", (1,), (0,), 64),
    Case("only padding", (0, 0), (0, 0), 64),
    Case("around a page", (63, 65, 64), (0, 0, 0), 256),
    Case("cached pages", (100, 5, 0), (64, 128, 0), 256),
    Case("one row takes all", (192,), (0,), 192),
    Case("pages of 16, rows inside a block", (70, 17, 3), (32, 0, 80), 128, page_size=16, pages_a_row=8),
    Case("fewer places than a block", (3,), (16,), 16, page_size=16, pages_a_row=3),
    Case("pages of 128", (130,), (0,), 256, page_size=128, pages_a_row=2),
    Case("a window", (100, 30), (64, 128), 192, window=40),
    Case("a window of one key", (70,), (0,), 128, window=1),
    Case("sinks", (65, 1), (0, 0), 192, has_sinks=True),
    Case("soft cap", (65,), (0,), 128, soft_cap=2.0),
    Case(
        *("window, sinks and soft cap", (70, 17), (32, 0), 112),
        **{"page_size": 16, "pages_a_row": 8, "window": 40, "soft_cap": 5.0, "has_sinks": True},
    ),
    Case("heads of 128", (65,), (0,), 128, head_dim=128),
    Case("heads of 256", (20,), (64,), 64, head_dim=256),
)


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op by name. Every place that no row may see holds NaN, the dummy page 0 included."""
    rng = np.random.default_rng(seed)
    num_keys = tuple(c + n for c, n in zip(case.context_len, case.row_len, strict=True))
    layout = DecodeCase(
        *(case.name, num_keys, case.num_heads, case.num_kv_heads, case.head_dim),
        page_size=case.page_size,
        pages_a_row=case.pages_a_row,
    )
    pages, table = poisoned_pages(layout, num_keys, rng)
    for row, (context_len, length) in enumerate(zip(case.context_len, case.row_len, strict=True)):
        unseen = max(0, context_len - case.window + 1) if case.window is not None and length else 0
        for position in range(unseen):
            pages[table[row, position // case.page_size], :, :, position % case.page_size] = np.nan
    q = rng.standard_normal((case.num_tokens, case.num_heads, case.head_dim)).astype(np.float32)
    return {
        "q": jnp.asarray(q),
        "pages": jnp.asarray(pages, case.dtype),
        "page_table": jnp.asarray(table, jnp.int32),
        "row_start": jnp.array(case.row_start, jnp.int32),
        "row_len": jnp.array(case.row_len, jnp.int32),
        "context_len": jnp.array(case.context_len, jnp.int32),
        "sinks": jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.has_sinks else None,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }


def aot_case(model: ModelShape, num_tokens: int, num_rows: int, page_size: int = 64) -> AotCase:
    """The kernel alone at a model's shape."""
    function = functools.partial(_with_sinks_last, window=model.window, soft_cap=model.soft_cap)
    row_values = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    args = (
        jax.ShapeDtypeStruct((num_tokens, model.num_heads, model.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((4096, 2, model.num_kv_heads, page_size, model.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows, 8192 // page_size), jnp.int32),
        *(row_values, row_values, row_values),
    )
    args += (jax.ShapeDtypeStruct((model.num_heads,), jnp.float32),) if model.has_sinks else ()
    name = f"prefill_attention/{model.name}/page={page_size}/tokens={num_tokens}/rows={num_rows}"
    return AotCase(name, function, args)


def _with_sinks_last(*arrays_then_sinks, **options):
    arrays, sinks = arrays_then_sinks[:6], arrays_then_sinks[6:]
    return prefill_attention_mosaic(*arrays, sinks=sinks[0] if sinks else None, **options)


AOT_CASES: tuple[AotCase, ...] = (
    *(aot_case(model, num_tokens=2048, num_rows=8) for model in MODEL_SHAPES),
    aot_case(MODEL_SHAPES[0], num_tokens=2048, num_rows=8, page_size=16),
)
