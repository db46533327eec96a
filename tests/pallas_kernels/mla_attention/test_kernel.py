"""The Mosaic kernel in the interpreter: right numbers, no races, and planted bugs that show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret import interpret_params, races_found
from pallas_kernels.mla_attention import kernel
from pallas_kernels.mla_attention.cases import CASES, Case, make_inputs
from pallas_kernels.mla_attention.kernel import mla_attention_mosaic
from pallas_kernels.mla_attention.reference import mla_attention_reference
from pallas_kernels.paged_attention.kernel import DecodeTiles

TWO_SPLITS = DecodeTiles(splits=2, steps=2)


def forget_compiled() -> None:
    """A kernel is traced once for its shapes; a planted bug must neither miss that nor stay in it."""
    getattr(kernel._decode, "clear_cache")()  # noqa: B009


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference_without_a_race(case: Case) -> None:
    """Outputs and shared memory begin as NaN in the interpreter, so what is not written shows."""
    inputs = make_inputs(case)
    tiles = DecodeTiles(1, steps=1) if case.num_latent == 512 else TWO_SPLITS
    out = mla_attention_mosaic(**inputs, tiles=tiles, interpret=interpret_params())
    want = np.asarray(mla_attention_reference(**inputs))
    assert not races_found()
    np.testing.assert_allclose(out, want, atol=0.02)  # queries and weights are rounded to bfloat16


def test_two_writers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that take themselves for the first."""
    index = jax.lax.axis_index
    monkeypatch.setattr(kernel.lax, "axis_index", lambda name: jnp.int32(0) if name == "row" else index(name))
    assert_noticed((60, 60))


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.plgpu, "barrier_wait", lambda barrier: None)
    assert_noticed((60,))


def assert_noticed(kv_len: tuple[int, ...]) -> None:
    forget_compiled()
    inputs = make_inputs(Case("planted", kv_len, num_heads=1))
    try:
        jax.block_until_ready(
            mla_attention_mosaic(**inputs, tiles=DecodeTiles(1, 1), interpret=interpret_params())
        )
    except Exception:  # jax 0.12 raises on a race
        return
    finally:
        forget_compiled()
    assert races_found()


def test_too_many_steps_are_named() -> None:
    inputs = make_inputs(CASES[-1])
    with pytest.raises(ValueError, match="at most 2 steps of 576 channels"):
        mla_attention_mosaic(**inputs, tiles=DecodeTiles(1, 3), interpret=interpret_params())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_equals_reference_on_the_gpu() -> None:
    for case in CASES:
        inputs = make_inputs(case)
        out = mla_attention_mosaic(**inputs)
        with jax.default_matmul_precision("highest"):
            want = np.asarray(mla_attention_reference(**inputs))
        np.testing.assert_allclose(out, want, atol=0.02, err_msg=case.name)
