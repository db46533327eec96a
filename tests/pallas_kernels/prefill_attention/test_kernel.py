"""The Mosaic kernel in the interpreter: right numbers, no races, and a planted bug that shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret import interpret_params, races_found
from pallas_kernels.prefill_attention import kernel
from pallas_kernels.prefill_attention.cases import CASES, Case, make_inputs
from pallas_kernels.prefill_attention.kernel import QueryBlocks, map_blocks, prefill_attention_mosaic
from pallas_kernels.prefill_attention.reference import prefill_attention_reference

# Keys beyond the context are NaN, and some builds of numpy say so when the interpreter multiplies them; they are masked
# afterwards, or the comparison with the reference fails.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


def forget_compiled() -> None:
    """A kernel is traced once for its shapes; a planted bug must neither miss that nor stay in it."""
    getattr(kernel._prefill, "clear_cache")()  # noqa: B009


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference_without_a_race(case: Case) -> None:
    """Outputs and shared memory begin as NaN in the interpreter, so what is not written shows. Padding is zeros."""
    inputs = make_inputs(case)
    out = prefill_attention_mosaic(**inputs, steps=2, interpret=interpret_params())
    want = np.asarray(prefill_attention_reference(**inputs))
    assert not races_found()
    np.testing.assert_allclose(
        out, want, atol=0.02
    )  # queries, weights and the result are rounded to bfloat16


def test_two_blocks_of_the_same_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = jnp.zeros(2, jnp.int32)
    blocks = QueryBlocks(jnp.array([2], jnp.int32), twice, twice)
    monkeypatch.setattr(kernel, "map_blocks", lambda row_len, num_tokens: blocks)
    forget_compiled()
    inputs = make_inputs(Case("planted", (60,), (0,), 64, num_heads=1))
    try:
        jax.block_until_ready(prefill_attention_mosaic(**inputs, steps=2, interpret=interpret_params()))
    except Exception:  # jax 0.12 raises on a race
        return
    finally:
        forget_compiled()
    assert races_found()


def test_blocks_belong_to_one_row_each() -> None:
    blocks = map_blocks(jnp.array([100, 0, 64, 1, 0], jnp.int32), 256)
    assert int(blocks.num_live[0]) == 4
    assert blocks.row[:4].tolist() == [0, 0, 2, 3]
    assert blocks.offset[:4].tolist() == [0, 64, 0, 0]
    assert blocks.row.shape == (9,)


def test_too_many_steps_are_named() -> None:
    inputs = make_inputs(Case("large", (1,), (0,), 64, head_dim=256))
    with pytest.raises(ValueError, match="4 steps of 64 keys of 256 need"):
        prefill_attention_mosaic(**inputs, steps=4, interpret=interpret_params())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_equals_reference_on_the_gpu() -> None:
    for case in CASES:
        inputs = make_inputs(case)
        out = prefill_attention_mosaic(**inputs)
        with jax.default_matmul_precision("highest"):
            want = np.asarray(prefill_attention_reference(**inputs))
        np.testing.assert_allclose(out, want, atol=0.02, err_msg=case.name)
