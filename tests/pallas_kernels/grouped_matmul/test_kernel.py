"""The Hopper kernel in the interpreter, race detection on, against float32; what it must never read or leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.cases import CASES, NORMAL, SWAPPED, Case
from pallas_kernels.grouped_matmul.kernel import grouped_matmul_tiles
from pallas_kernels.grouped_matmul.op import grouped_matmul, grouped_matmul_mosaic
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.tiles import TileConfig, map_tiles
from pallas_kernels.interpret import interpret_params


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    num_experts = len(case.group_sizes)
    columns = case.outputs * (1 if case.gate is None else 2)
    x = rng.standard_normal((case.num_rows, case.k), dtype=np.float32)
    w = rng.standard_normal((num_experts, columns, case.k), dtype=np.float32) * 2 * case.k**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.array(case.group_sizes, jnp.int32)


def interpreted(case: Case, x: jax.Array, w: jax.Array, sizes: jax.Array) -> np.ndarray:
    y = grouped_matmul_mosaic(x, w, sizes, case.gate, tile=case.tile, interpret=interpret_params())
    assert (y.shape, y.dtype) == ((case.num_rows, case.outputs), jnp.bfloat16)
    return np.asarray(jax.block_until_ready(y), np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_with_padding_and_unused_experts_poisoned(case: Case) -> None:
    x, w, sizes = make_inputs(case)
    num_real = sum(case.group_sizes)
    unused = np.asarray(case.group_sizes) == 0
    expected = np.asarray(grouped_matmul_reference(x, w, sizes, case.gate), np.float32)
    actual = interpreted(case, x.at[num_real:].set(jnp.nan), w.at[unused].set(jnp.nan), sizes)
    np.testing.assert_allclose(actual, expected, atol=2e-2, rtol=1e-2)  # one bfloat16 rounding
    np.testing.assert_array_equal(actual[num_real:], 0.0)
    assert num_real == 0 or np.abs(expected[:num_real]).max() > 0.1


@pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
def test_dead_tiles_stay_unwritten_and_live_ones_are_whole(tile: TileConfig) -> None:
    """The interpreter fills outputs with NaN: what is NaN afterwards was not written."""
    x, w, sizes = make_inputs(Case("", (3, 0, 9, 1)))
    tiles = map_tiles(sizes, x.shape[0], tile.rows)
    y = grouped_matmul_tiles(
        x[tiles.sorted_row], w, tiles.num_live, tiles.expert, tile=tile, interpret=interpret_params()
    )
    written = ~np.isnan(np.asarray(y, np.float32)).reshape(len(tiles.expert), tile.rows, -1)
    assert written[:3].all()
    assert len(written) > 3
    assert not written[3:].any()


def test_no_rows_need_no_kernel() -> None:
    w = jnp.zeros((2, 64, 128), jnp.bfloat16)
    y = grouped_matmul_mosaic(jnp.zeros((0, 128), jnp.bfloat16), w, jnp.zeros(2, jnp.int32), "silu")
    assert y.shape == (0, 32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_op_takes_xla_on_a_cpu(case: Case) -> None:
    x, w, sizes = make_inputs(case)
    num_real = sum(case.group_sizes)
    expected = np.asarray(grouped_matmul_reference(x, w, sizes, case.gate), np.float32)
    unused = np.asarray(case.group_sizes) == 0
    got = grouped_matmul(x.at[num_real:].set(jnp.nan), w.at[unused].set(jnp.nan), sizes, gate=case.gate)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2e-2, rtol=1e-2)


def test_mosaic_by_name_says_what_it_needs() -> None:
    x, w, sizes = make_inputs(Case("", (3, 0, 9, 1), gate="silu"))
    with pytest.raises(NotImplementedError, match="mosaic: needs a Hopper GPU"):
        grouped_matmul(x, w, sizes, gate="silu", backend="mosaic")


def test_bad_arguments_are_named() -> None:
    x, w, sizes = make_inputs(Case("", (3, 1)))
    with pytest.raises(ValueError, match=r"\(4, 127\)"):
        grouped_matmul(x[:, 1:], w, sizes)
    with pytest.raises(ValueError, match="group_sizes"):
        grouped_matmul(x, w, sizes[1:])
    with pytest.raises(ValueError, match="'relu'"):
        grouped_matmul(x, w, sizes, gate="relu")
    with pytest.raises(ValueError, match="63 rows"):
        grouped_matmul(x, w[:, 1:], sizes, gate="silu")
    with pytest.raises(NotImplementedError, match="multiples of 64, the contraction is 127"):
        grouped_matmul(x[:, 1:], w[:, :, 1:], sizes, backend="mosaic")
    with pytest.raises(NotImplementedError, match="takes bfloat16, x is float32"):
        grouped_matmul(x.astype(jnp.float32), w, sizes, backend="mosaic")
