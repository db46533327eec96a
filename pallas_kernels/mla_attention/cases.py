"""The named cases that test, ahead-of-time build and benchmark share: tiny ones, the extremes, and DeepSeek-V3's shape."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.mla_attention.kernel import mla_attention_mosaic


@dataclass(frozen=True)
class Case:
    """One call of the op: the keys of each row, and the widths."""

    name: str
    kv_len: tuple[int, ...]
    num_heads: int = 4
    num_latent: int = 64
    num_rotary: int = 64
    page_size: int = 64
    pages_a_row: int = 4
    dtype: str = "bfloat16"


CASES: tuple[Case, ...] = (
    Case("one row of one key", (1,)),
    Case("no keys at all", (0, 0)),
    Case("lengths 0, 1 and around pages", (0, 1, 63, 64, 65, 256)),
    Case("one long row among short ones", (2, 256, 0)),
    Case("pages of 16", (15, 17, 130), page_size=16, pages_a_row=9),
    Case("pages of 128", (127, 129), page_size=128, pages_a_row=2),
    Case("more heads than a block", (65,), num_heads=70),
    Case("two parts of the latent", (65,), num_latent=512, pages_a_row=2),
)


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of the op by name. Every place that no row may see holds NaN, the dummy page 0 included."""
    rng = np.random.default_rng(seed)
    num_rows, width = len(case.kv_len), case.num_latent + case.num_rotary
    table = 1 + rng.permutation(num_rows * case.pages_a_row).reshape(num_rows, case.pages_a_row)
    pages = rng.standard_normal((table.size + 1, case.page_size, width)).astype(np.float32)
    pages[0] = np.nan
    for row, length in enumerate(case.kv_len):
        for column in range(case.pages_a_row):
            pages[table[row, column], max(0, length - column * case.page_size) :] = np.nan
    q = rng.standard_normal((num_rows, case.num_heads, width)).astype(np.float32)
    return {
        "q": jnp.asarray(q),
        "pages": jnp.asarray(pages, case.dtype),
        "page_table": jnp.asarray(table, jnp.int32),
        "kv_len": jnp.array(case.kv_len, jnp.int32),
        "num_latent": case.num_latent,
        "scale": width**-0.5,
    }


def aot_case(num_rows: int, page_size: int = 64, num_heads: int = 128) -> AotCase:
    """The kernel alone at DeepSeek-V3's shape: 512 latent and 64 rotary channels."""
    args = (
        jax.ShapeDtypeStruct((num_rows, num_heads, 576), jnp.float32),
        jax.ShapeDtypeStruct((4096, page_size, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows, 8192 // page_size), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    function = functools.partial(mla_attention_mosaic, num_latent=512, scale=192**-0.5)
    return AotCase(f"mla_attention/deepseek-v3/page={page_size}/rows={num_rows}", function, args)


AOT_CASES: tuple[AotCase, ...] = (aot_case(64), aot_case(1), aot_case(64, page_size=16))
