"""Rows and the integers in their bits arrive as they were sent, whatever the type and the bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.experts.wire import FP8, from_wire, to_wire


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, FP8], ids=["f32", "bf16", "fp8"])
def test_labels_keep_every_bit(dtype) -> None:
    """Bits that are a signalling NaN or a denormal in the row's type included."""
    rng = np.random.default_rng(0)
    labels = rng.integers(-(2**31), 2**31, (64, 6), dtype=np.int64).astype(np.int32)
    labels[0] = [0, 1, -1, 0x7F817F81, 0x7F800001, -0x7E7E8000]
    x = jnp.asarray(rng.standard_normal((64, 16)), jnp.bfloat16)

    @jax.jit
    def travel(x, labels):
        return from_wire(tuple(jnp.roll(a, 1, axis=0) for a in to_wire(x, dtype, labels)), x.dtype, 16)

    rows, found = travel(x, jnp.asarray(labels))
    np.testing.assert_array_equal(found, np.roll(labels, 1, axis=0))
    error = 0.07 if dtype == FP8 else 0.0
    np.testing.assert_allclose(
        rows.astype(jnp.float32), jnp.roll(x, 1, axis=0).astype(jnp.float32), rtol=error, atol=error / 10
    )
