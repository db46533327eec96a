"""Operands for a case."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.cases import Case
from pallas_kernels.quantized_matmul.quantise import (
    E4M3,
    QuantizedRows,
    QuantizedWeights,
    quantise_blocks,
    quantise_outputs,
    quantise_rows,
)


def make_floats(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x, w, group sizes) before anything is quantised; w gives unit variance out."""
    rng = np.random.default_rng(seed)
    columns = case.outputs * (1 if case.gate is None else 2)
    x = rng.standard_normal((case.num_rows, case.k), dtype=np.float32)
    w = rng.standard_normal((len(case.group_sizes), columns, case.k), dtype=np.float32) * case.k**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), jnp.array(case.group_sizes, jnp.int32)


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array | QuantizedRows, QuantizedWeights, jax.Array]:
    x, w, sizes = make_floats(case, seed)
    if case.kind == "blocks":
        return quantise_rows(x), quantise_blocks(w), sizes
    return x, quantise_outputs(w, jnp.int8 if case.kind == "int8" else E4M3), sizes
