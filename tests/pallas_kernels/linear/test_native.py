"""The C++ kernel against the float32 product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear.native import linear_native
from pallas_kernels.linear.op import linear
from pallas_kernels.native.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"native: {unavailable()}")


def make_inputs(num_rows: int, d: int, out: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, d)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((out, d)) * d**-0.5, jnp.bfloat16)


@pytest.mark.parametrize("num_rows", [*range(1, 18), 28, 29, 33, 48, 64, 77])
@pytest.mark.parametrize(("d", "out"), [(1024, 40), (40, 7)])
def test_equals_the_float32_product(num_rows: int, d: int, out: int) -> None:
    x, w = make_inputs(num_rows, d, out)
    actual = jax.jit(linear_native)(x, w)
    assert (actual.shape, actual.dtype) == ((num_rows, out), jnp.float32)
    expected = np.asarray(linear(x, w, out_dtype=jnp.float32, backend="reference"))
    np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("d", [1, 2, 15, 31, 33, 63, 66])
def test_every_remainder_of_the_contraction(d: int) -> None:
    for num_rows in (1, 5, 16, 35):
        test_equals_the_float32_product(num_rows, d, 9)


def test_the_number_of_threads_changes_nothing() -> None:
    x, w = make_inputs(45, 256, 1000)
    np.testing.assert_array_equal(
        np.asarray(linear_native(x, w, max_threads=1)), np.asarray(linear_native(x, w))
    )


def test_nothing_to_multiply() -> None:
    assert linear_native(jnp.ones((0, 8), jnp.bfloat16), jnp.ones((3, 8), jnp.bfloat16)).shape == (0, 3)
    empty = linear_native(jnp.ones((2, 0), jnp.bfloat16), jnp.ones((3, 0), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(empty), np.zeros((2, 3), np.float32))


def test_rows_one_by_one_under_vmap() -> None:
    x, w = make_inputs(6, 64, 20)
    stacked = jax.vmap(linear_native, in_axes=(0, None))(x.reshape(3, 2, 64), w)
    np.testing.assert_allclose(
        np.asarray(stacked).reshape(6, 20), np.asarray(linear_native(x, w)), rtol=1e-6, atol=1e-6
    )


def test_it_is_what_the_op_chooses_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LADDER_DISABLE_BACKENDS", raising=False)
    assert "moe_ladder_linear" in jax.jit(linear).lower(*make_inputs(2, 64, 8)).as_text()
