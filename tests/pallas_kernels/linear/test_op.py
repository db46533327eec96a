"""The dense product in XLA against its reference, over the row counts where the form changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lanes import lane_product, num_lanes
from pallas_kernels.linear.op import linear

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize(("d", "out"), [(64, 48), (1024, 96), (40, 7)])
def test_equals_reference(num_rows: int, d: int, out: int, dtype: str) -> None:
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, d)), dtype)
    w = jnp.asarray(rng.standard_normal((out, d)) * d**-0.5, dtype)
    expected = np.asarray(linear(x, w, backend="reference"), np.float32)
    actual = jax.jit(partial(linear, backend="xla"))(x, w)
    assert (actual.shape, actual.dtype) == ((num_rows, out), jnp.dtype(dtype))
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_logits_may_stay_in_float32() -> None:
    x, w = jnp.ones((2, 64), jnp.bfloat16), jnp.full((5, 64), 1.0078125, jnp.bfloat16)
    logits = linear(x, w, out_dtype=jnp.float32)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(logits), np.full((2, 5), 64.5, np.float32))


def test_lanes_of_known_widths() -> None:
    assert [num_lanes(k) for k in (32, 1024, 2048, 4096, 14336, 40)] == [32, 32, 64, 128, None, None]
    with pytest.raises(ValueError, match="40"):
        lane_product(jnp.ones((1, 40)), jnp.ones((1, 3, 40)), 0)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(3, 9\)"):
        linear(jnp.ones((2, 8)), jnp.ones((3, 9)))


def test_a_weight_is_not_converted_as_a_whole() -> None:
    """The float32 copy of a weight would triple the traffic; only float32 partial sums may be large."""
    x = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    compiled = jax.jit(partial(linear, backend="xla")).lower(x, w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 1024 * 2
