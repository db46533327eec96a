"""Error bounds of every kind of quantisation, what scales are shared by, and values that are easy to get wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.quantized_matmul.dispatch import permute_quantised
from pallas_kernels.quantized_matmul.quantise import (
    E4M3,
    dequantise_rows,
    dequantise_weights,
    quantise_blocks,
    quantise_outputs,
    quantise_rows,
)


def wild(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values over many magnitudes, zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 4, shape)
    return np.where(rng.random(shape) < 0.1, 0, values).astype(np.float32)


def e4m3_bound(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x) / 16, scales / 1024) * (1 + 1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_errors_keep_their_bounds(seed: int) -> None:
    x, w = wild((5, 256), seed), wild((2, 256, 128), seed + 1)
    rows = quantise_rows(jnp.asarray(x))
    assert (rows.values.dtype, rows.scales.shape) == (E4M3, (2, 5))
    wide = np.repeat(np.asarray(rows.scales).T, 128, axis=1)
    assert (np.abs(np.asarray(dequantise_rows(rows)) - x) <= e4m3_bound(x, wide)).all()

    blocks = quantise_blocks(jnp.asarray(w))
    assert (blocks.values.dtype, blocks.scales.shape, blocks.has_blocks) == (E4M3, (2, 2, 1), True)
    wide = np.repeat(np.repeat(np.asarray(blocks.scales), 128, axis=1), 128, axis=2)
    assert (np.abs(np.asarray(dequantise_weights(blocks)) - w) <= e4m3_bound(w, wide)).all()

    outputs = quantise_outputs(jnp.asarray(w), E4M3)
    assert (outputs.scales.shape, outputs.has_blocks) == ((2, 256), False)
    wide = np.asarray(outputs.scales)[:, :, None]
    assert (np.abs(np.asarray(dequantise_weights(outputs)) - w) <= e4m3_bound(w, wide)).all()

    ints = quantise_outputs(jnp.asarray(w), jnp.int8)
    wide = np.asarray(ints.scales)[:, :, None]
    assert (np.abs(np.asarray(dequantise_weights(ints)) - w) <= wide / 2 * (1 + 1e-4)).all()


def test_the_error_of_usual_weights() -> None:
    """Root mean square against that of normal weights: what one may expect, so that a worse rounding shows."""
    w = np.random.default_rng(0).standard_normal((1, 256, 256)).astype(np.float32)

    def error(q) -> float:
        return float(np.sqrt(np.mean((np.asarray(dequantise_weights(q)) - w) ** 2)))

    assert 0.02 < error(quantise_blocks(jnp.asarray(w))) < 0.03
    assert 0.02 < error(quantise_outputs(jnp.asarray(w), E4M3)) < 0.03
    assert error(quantise_outputs(jnp.asarray(w), jnp.int8)) < 0.008


def test_the_largest_value_is_kept_and_nothing_becomes_nan() -> None:
    x = jnp.zeros((3, 128)).at[0, 5].set(-3e38).at[1, 7].set(1e-30)
    back = np.asarray(dequantise_rows(quantise_rows(x)))
    np.testing.assert_allclose(back[0, 5], -3e38, rtol=1e-6)
    np.testing.assert_allclose(back[1, 7], 1e-30, rtol=1e-6)
    assert np.isfinite(back).all()
    assert not back[2].any()


def test_nan_is_not_hidden() -> None:
    back = np.asarray(dequantise_rows(quantise_rows(jnp.ones((2, 128)).at[0, 3].set(jnp.nan))))
    assert np.isnan(back[0]).any()
    assert not np.isnan(back[1]).any()


def test_a_scale_is_shared_by_its_block_only() -> None:
    w = jnp.ones((1, 256, 256)).at[0, 0, 0].set(1000.0)
    scales = np.asarray(quantise_blocks(w).scales)[0]
    np.testing.assert_allclose(scales * 448, [[1000, 1], [1, 1]], rtol=1e-6)
    rows = quantise_rows(jnp.ones((2, 256)).at[1, 200].set(1000.0))
    np.testing.assert_allclose(np.asarray(rows.scales) * 448, [[1, 1], [1, 1000]], rtol=1e-6)


def test_tokens_are_quantised_once_and_gathered_as_bytes() -> None:
    x = jnp.asarray(wild((6, 256), 3))
    token_of_row = jnp.array([5, 0, 0, 3, 2], jnp.int32)
    got, want = permute_quantised(x, token_of_row), quantise_rows(x[token_of_row])
    np.testing.assert_array_equal(got.values.astype(jnp.float32), want.values.astype(jnp.float32))
    np.testing.assert_array_equal(got.scales, want.scales)
    jaxpr = str(jax.make_jaxpr(permute_quantised)(x, token_of_row))
    assert "f8_e4m3fn[5,256] = gather" in jaxpr


def test_bad_operands_are_named() -> None:
    with pytest.raises(ValueError, match="the contraction is 100, expected a multiple of 128"):
        quantise_rows(jnp.zeros((2, 100)))
    with pytest.raises(ValueError, match="the outputs is 64"):
        quantise_blocks(jnp.zeros((1, 64, 128)))
    with pytest.raises(ValueError, match="dtype is int4"):
        quantise_outputs(jnp.zeros((1, 64, 128)), jnp.int4)
