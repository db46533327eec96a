"""Products of up to four rows with a weight matrix, as a loop that XLA's CPU backend compiles well.

XLA hands a bfloat16 dot to a library that first repacks the whole weight matrix: for a few rows that costs more than
the product. A one-row dot is worse, it falls back to scalar code. Here the contraction is cut into lanes instead:

    partial[o, b, l] = sum over j of  w[o, j * lanes + l] * x[b, j * lanes + l]      one fused loop, weights read once
    y[b, o]          = sum over l of  partial[o, b, l]                               small

The sum over j is unrolled, so the fused loop has no reduction in it: LLVM vectorises over l, reads each row of the
weights from end to end, and converts to float32 in registers. The slice of a stacked weight fuses into the loop too and
is never copied.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MAX_TERMS = 32  # unrolled length of the sum: more makes the compiler slow, fewer makes the partial sums large
LANES = (32, 64, 128, 256)
MAX_ROWS = 4  # from about five rows on, the repacked product of the library is as quick


def num_lanes(contraction: int) -> int | None:
    """Lanes for a contraction of this length; None where it cannot be cut, and a plain dot has to do."""
    return next((n for n in LANES if contraction % n == 0 and contraction // n <= MAX_TERMS), None)


def lane_product(
    x: Float[Array, "B K"], w: Float[Array, "E O K"], index: int | Int[Array, ""]
) -> Float[Array, "B O"]:
    """x @ w[index].T in float32. Only for a K that `num_lanes` can cut."""
    num_rows, contraction = x.shape
    lanes = num_lanes(contraction)
    if lanes is None:
        raise ValueError(
            f"a contraction of {contraction} cannot be cut into at most {MAX_TERMS} terms of {LANES} lanes"
        )
    terms, outputs = contraction // lanes, w.shape[1]
    w_terms = w.reshape(w.shape[0], outputs, terms, lanes)
    # Converted here, once; without the barrier the conversion moves into the inner loop.
    x_terms = lax.optimization_barrier(x.astype(jnp.float32)).reshape(num_rows, terms, lanes)
    partial = _term(x_terms, w_terms, index, 0)
    for j in range(1, terms):
        partial += _term(x_terms, w_terms, index, j)
    # The barrier keeps the sum over lanes out of the fused loop, which would turn it into a library call.
    return jnp.sum(lax.optimization_barrier(partial), axis=-1).T


def _term(x_terms: Array, w_terms: Array, index: int | Array, j: int) -> Array:
    """Term j of the unrolled sum: [O, B, lanes]. One slice per term: a slice that all shared would be copied."""
    _, outputs, _, lanes = w_terms.shape
    w = lax.dynamic_slice(w_terms, (index, 0, j, 0), (1, outputs, 1, lanes)).reshape(outputs, 1, lanes)
    return w.astype(jnp.float32) * x_terms[None, :, j]
