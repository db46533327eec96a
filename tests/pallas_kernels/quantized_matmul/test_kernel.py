"""The Hopper kernels in the interpreter, race detection on, against float32; and planted bugs that show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpret_params, races_found
from pallas_kernels.quantized_matmul import kernel
from pallas_kernels.quantized_matmul.cases import CASES, NORMAL, Case, make_inputs
from pallas_kernels.quantized_matmul.op import quantized_matmul_mosaic
from pallas_kernels.quantized_matmul.quantise import QuantizedRows, QuantizedWeights
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.tiles import QuantizedTile


def forget_compiled() -> None:
    """A kernel is traced once for its shapes; a planted bug must neither miss that nor stay in it."""
    for run in (kernel.block_scaled_matmul_tiles, kernel.output_scaled_matmul_tiles):
        getattr(run, "clear_cache")()  # noqa: B009


def interpreted(
    case: Case, x: jax.Array | QuantizedRows, w: QuantizedWeights, sizes: jax.Array
) -> np.ndarray:
    y = quantized_matmul_mosaic(x, w, sizes, case.gate, tile=case.tile, interpret=interpret_params())
    assert (y.shape, y.dtype) == ((case.num_rows, case.outputs), jnp.bfloat16)
    return np.asarray(jax.block_until_ready(y), np.float32)


def poisoned(case: Case, x: jax.Array | QuantizedRows, w: QuantizedWeights) -> tuple:
    """NaN in the scales of padding rows (or the rows) and of unused experts."""
    num_real, unused = sum(case.group_sizes), np.asarray(case.group_sizes) == 0
    if isinstance(x, QuantizedRows):
        x = QuantizedRows(x.values, x.scales.at[:, num_real:].set(jnp.nan))
    else:
        x = x.at[num_real:].set(jnp.nan)
    return x, QuantizedWeights(w.values, w.scales.at[unused].set(jnp.nan))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_with_padding_and_unused_experts_poisoned(case: Case) -> None:
    x, w, sizes = make_inputs(case)
    num_real = sum(case.group_sizes)
    expected = np.asarray(quantized_matmul_reference(x, w, sizes, case.gate), np.float32)
    actual = interpreted(case, *poisoned(case, x, w), sizes)
    assert not races_found()
    np.testing.assert_allclose(actual, expected, atol=2e-2, rtol=1e-2)  # one bfloat16 rounding
    np.testing.assert_array_equal(actual[num_real:], 0.0)
    assert num_real == 0 or np.abs(expected[:num_real]).max() > 0.1


def test_weights_alone_have_to_be_the_left_operand() -> None:
    case = Case("int8, rows first", (3,), "int8", NORMAL)
    with pytest.raises(ValueError, match="swap has to be True"):
        interpreted(case, *make_inputs(case))


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (QuantizedTile(12, 64), "rows=12"),
        (QuantizedTile(128, 64, swap=False), "rows=128"),
        (QuantizedTile(16, 96), "outputs=96"),
        (QuantizedTile(16, 64, steps=1), "steps=1"),
        (QuantizedTile(128, 128, steps=9), "needs 448000"),
    ],
)
def test_what_is_no_tile_is_refused(tile: QuantizedTile, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile.check(256, row_bytes=2, is_gated=False)


@pytest.mark.parametrize("kind", ["blocks", "int8"])
def test_two_writers_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles of outputs take themselves for the first."""
    index = jax.lax.axis_index
    monkeypatch.setattr(
        kernel.lax, "axis_index", lambda name: index("tile") if name == "tile" else jnp.int32(0)
    )
    assert_noticed(Case("planted: two writers", (9,), kind))


@pytest.mark.parametrize("kind", ["blocks", "int8"])
def test_a_missing_wait_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda *_, **__: None)
    assert_noticed(Case("planted: no wait", (9,), kind))


def assert_noticed(case: Case) -> None:
    forget_compiled()
    try:
        interpreted(case, *make_inputs(case))
    except Exception:  # jax 0.12 raises on a race, both where memory is let go too early
        return
    finally:
        forget_compiled()
    assert races_found()


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_equals_reference_on_the_gpu() -> None:
    for case in CASES:
        x, w, sizes = make_inputs(case)
        got = quantized_matmul_mosaic(x, w, sizes, case.gate, tile=case.tile)
        with jax.default_matmul_precision("highest"):
            want = quantized_matmul_reference(x, w, sizes, case.gate)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2, rtol=1e-2, err_msg=case.name
        )
