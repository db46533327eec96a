"""The quantised products' named cases for the check on a chip; scales of padding rows and of unused experts are NaN."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.small_cases import SmallCase
from pallas_kernels.quantized_matmul.cases import CASES  # pyright: ignore[reportMissingImports]
from pallas_kernels.quantized_matmul.op import quantized_matmul_mosaic  # pyright: ignore[reportMissingImports]
from pallas_kernels.quantized_matmul.quantise import (  # pyright: ignore[reportMissingImports]
    E4M3,
    QuantizedRows,
    QuantizedWeights,
    quantise_blocks,
    quantise_outputs,
    quantise_rows,
)
from pallas_kernels.quantized_matmul.reference import (  # pyright: ignore[reportMissingImports]
    quantized_matmul_reference,
)


def small_cases(seed: int) -> Iterator[SmallCase]:
    for case in CASES:
        yield SmallCase(
            f"quantized_matmul/{case.name}",
            _inputs(case, seed),
            lambda interpret, case=case: partial(
                quantized_matmul_mosaic, gate=case.gate, tile=case.tile, interpret=interpret
            ),
            partial(quantized_matmul_reference, gate=case.gate),
            is_short=case.name in ("blocks, one row", "int8, one row"),
        )


def _inputs(case: Any, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    columns, num_real = case.outputs * (1 if case.gate is None else 2), sum(case.group_sizes)
    x = jnp.asarray(rng.standard_normal((case.num_rows, case.k), np.float32), jnp.bfloat16)
    w = rng.standard_normal((len(case.group_sizes), columns, case.k), np.float32) * case.k**-0.5
    if case.kind == "blocks":
        rows, weights = quantise_rows(x), quantise_blocks(jnp.asarray(w))
        rows = QuantizedRows(rows.values, rows.scales.at[:, num_real:].set(jnp.nan))
    else:
        rows = x.at[num_real:].set(jnp.nan)
        weights = quantise_outputs(jnp.asarray(w), jnp.int8 if case.kind == "int8" else E4M3)
    unused = np.asarray(case.group_sizes) == 0
    weights = QuantizedWeights(weights.values, weights.scales.at[unused].set(jnp.nan))
    return rows, weights, jnp.array(case.group_sizes, jnp.int32)
