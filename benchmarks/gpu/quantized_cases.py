"""The quantised products' named cases for the check on a chip; scales of padding rows and of unused experts are NaN."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.small_case import SmallCase
from pallas_kernels.quantized_matmul.cases import CASES, Case, make_inputs
from pallas_kernels.quantized_matmul.op import quantized_matmul_mosaic
from pallas_kernels.quantized_matmul.quantise import QuantizedRows, QuantizedWeights
from pallas_kernels.quantized_matmul.reference import (
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


def _inputs(case: Case, seed: int) -> tuple[jax.Array | QuantizedRows, QuantizedWeights, jax.Array]:
    """The operands with NaN where nobody may read."""
    x, w, sizes = make_inputs(case, seed)
    num_real = sum(case.group_sizes)
    if isinstance(x, QuantizedRows):
        x = QuantizedRows(x.values, x.scales.at[:, num_real:].set(jnp.nan))
    else:
        x = x.at[num_real:].set(jnp.nan)
    unused = np.asarray(case.group_sizes) == 0
    return x, QuantizedWeights(w.values, w.scales.at[unused].set(jnp.nan)), sizes
