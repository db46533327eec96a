"""The Mosaic kernel in the interpreter: right numbers, no races, and planted bugs that show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpret_params, races_found
from pallas_kernels.router import kernel
from pallas_kernels.router.cases import CASES, GROUPED, Case, make_inputs
from pallas_kernels.router.kernel import router_mosaic
from pallas_kernels.router.reference import router_reference
from pallas_kernels.router.spec import RouterChoice, RouterSpec


def forget_compiled() -> None:
    """A kernel is traced once for its shapes; a planted bug must neither miss that nor stay in it."""
    getattr(kernel._route, "clear_cache")()  # noqa: B009


def interpreted(case: Case, logits: jax.Array | None = None) -> RouterChoice:
    inputs = make_inputs(case)
    inputs = inputs if logits is None else (logits, *inputs[1:])
    return jax.block_until_ready(router_mosaic(*inputs, case.spec, interpret=interpret_params()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference_without_a_race(case: Case) -> None:
    """Outputs and shared memory begin as NaN in the interpreter, so what is not written shows."""
    got, want = interpreted(case), router_reference(*make_inputs(case), case.spec)
    assert not races_found()
    np.testing.assert_array_equal(got.expert_ids, want.expert_ids)
    np.testing.assert_array_equal(got.counts, want.counts)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5, atol=1e-7)


def test_logits_that_are_no_numbers_still_give_experts_that_exist() -> None:
    """One request's overflow must not reach the rows of others."""
    case = Case("overflow", GROUPED, num_experts=32, has_bias=True)
    logits = make_inputs(case)[0].at[1].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(-jnp.inf)
    got, want = interpreted(case, logits), interpreted(case)
    assert not races_found()
    ids = np.asarray(got.expert_ids)
    assert ((ids >= 0) & (ids < 32)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert int(jnp.sum(got.counts)) == 15
    np.testing.assert_array_equal(ids[[0, 4]], np.asarray(want.expert_ids)[[0, 4]])
    np.testing.assert_array_equal(got.weights[:1], want.weights[:1])


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    assert_noticed(Case("planted: no wait", RouterSpec(2)))


def test_two_writers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks that take themselves for the first."""
    monkeypatch.setattr(kernel.lax, "axis_index", lambda name: jnp.int32(0))
    assert_noticed(Case("planted: two writers", RouterSpec(2), num_tokens=70))


def assert_noticed(case: Case) -> None:
    forget_compiled()
    try:
        interpreted(case)
    except Exception:  # jax 0.12 raises on a race
        return
    finally:
        forget_compiled()
    assert races_found()


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_equals_reference_on_the_gpu() -> None:
    for case in CASES:
        got, want = (
            router_mosaic(*make_inputs(case), case.spec),
            router_reference(*make_inputs(case), case.spec),
        )
        np.testing.assert_array_equal(got.expert_ids, want.expert_ids, err_msg=case.name)
        np.testing.assert_array_equal(got.counts, want.counts, err_msg=case.name)
        np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5, err_msg=case.name)
