"""The named cases that test, ahead-of-time build and benchmark share: tiny ones, the extremes, and shapes of real models."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.paged_attention.kernel import paged_attention_mosaic


@dataclass(frozen=True)
class Case:
    """One call of the op: the keys of each row, and what the model does with them."""

    name: str
    kv_len: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 64
    pages_a_row: int = 4
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"


PAGE_EDGES = (0, 1, 63, 64, 65, 256)

CASES: tuple[Case, ...] = (
    Case("one row of one key", (1,)),
    Case("no keys at all", (0, 0)),
    Case("lengths 0, 1 and around pages", PAGE_EDGES),
    Case("one long row among short ones", (2, 256, 0)),
    Case("even", (128, 128)),
    Case("pages of 16", (0, 15, 17, 160), page_size=16, pages_a_row=10),
    Case("pages of 16, table of an odd width", (33, 80), page_size=16, pages_a_row=5),
    Case("pages of 32", (33, 96), page_size=32, pages_a_row=3),
    Case("pages of 128", (127, 129), page_size=128, pages_a_row=2),
    Case("a window", (0, 1, 70, 71, 200), window=70),
    Case("a window of one key", (1, 65), window=1),
    Case("a window over pages of 16", (20, 150), page_size=16, pages_a_row=10, window=20),
    Case("sinks", (0, 1, 100), has_sinks=True),
    Case("soft cap", (0, 1, 100), soft_cap=2.0),
    Case("window, sinks and soft cap", PAGE_EDGES, window=70, has_sinks=True, soft_cap=5.0),
    Case("a head for each kv head", (65,), num_heads=2),
    Case("five heads a kv head", (65, 1), num_heads=10),
    Case("heads of 128", (65, 0), head_dim=128),
    Case("heads of 256", (65,), head_dim=256, num_kv_heads=1),
)


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op by name. Every place that no row may see holds NaN, the dummy page 0 included."""
    rng = np.random.default_rng(seed)
    num_rows, page_size = len(case.kv_len), case.page_size
    pages, table = poisoned_pages(case, case.kv_len, rng)
    for row, length in enumerate(case.kv_len):
        unseen = 0 if case.window is None else max(0, length - case.window)
        for position in range(unseen):
            pages[table[row, position // page_size], :, :, position % page_size] = np.nan
    q = rng.standard_normal((num_rows, case.num_heads, case.head_dim)).astype(np.float32)
    return {
        "q": jnp.asarray(q),
        "pages": jnp.asarray(pages, case.dtype),
        "page_table": jnp.asarray(table, jnp.int32),
        "kv_len": jnp.array(case.kv_len, jnp.int32),
        "sinks": jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.has_sinks else None,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }


def poisoned_pages(
    case: Case, num_keys: tuple[int, ...], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(pages, page table): each row's pages are dealt out in a random order, and NaN from its last key on."""
    num_rows = len(num_keys)
    table = 1 + rng.permutation(num_rows * case.pages_a_row).reshape(num_rows, case.pages_a_row)
    shape = (table.size + 1, 2, case.num_kv_heads, case.page_size, case.head_dim)
    pages = rng.standard_normal(shape).astype(np.float32)
    pages[0] = np.nan
    for row, length in enumerate(num_keys):
        for column in range(case.pages_a_row):
            pages[table[row, column], :, :, max(0, length - column * case.page_size) :] = np.nan
    return pages, table


@dataclass(frozen=True)
class ModelShape:
    """The attention of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


MODEL_SHAPES: tuple[ModelShape, ...] = (
    ModelShape("qwen3-30b-a3b", 32, 4, 128),
    ModelShape("mixtral-8x7b", 32, 8, 128),
    ModelShape("gpt-oss-20b", 64, 8, 64, window=128, has_sinks=True),
    ModelShape("gemma-2-9b", 16, 8, 256, window=4096, soft_cap=50.0),
)


def aot_case(model: ModelShape, num_rows: int, page_size: int = 64, max_kv_len: int = 8192) -> AotCase:
    """The kernel alone at a model's shape, with the tiles that are chosen for it."""
    function = functools.partial(_with_sinks_last, window=model.window, soft_cap=model.soft_cap)
    heads = (model.num_heads,)
    args = (
        jax.ShapeDtypeStruct((num_rows, model.num_heads, model.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((4096, 2, model.num_kv_heads, page_size, model.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows, max_kv_len // page_size), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    args += (jax.ShapeDtypeStruct(heads, jnp.float32),) if model.has_sinks else ()
    return AotCase(f"paged_attention/{model.name}/page={page_size}/rows={num_rows}", function, args)


def _with_sinks_last(q, pages, page_table, kv_len, sinks=None, **options):
    return paged_attention_mosaic(q, pages, page_table, kv_len, sinks=sinks, **options)


AOT_CASES: tuple[AotCase, ...] = (
    *(aot_case(model, num_rows=64) for model in MODEL_SHAPES),
    aot_case(MODEL_SHAPES[0], num_rows=1),
    aot_case(MODEL_SHAPES[0], num_rows=64, page_size=16),
)
