"""The op against its reference, and what it must never touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_mlp.cases import CASES, Case
from pallas_kernels.expert_mlp.op import expert_mlp, pack_expert_weights

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    e, d, f = case.num_experts, case.d, case.f
    x = rng.standard_normal((case.num_rows, d), dtype=np.float32)
    gate, up = rng.standard_normal((2, e, f, d), dtype=np.float32) * d**-0.5
    down = rng.standard_normal((e, d, f), dtype=np.float32) * f**-0.5
    w_gate_up, w_down = pack_expert_weights(gate.astype(dtype), up.astype(dtype), down.astype(dtype))
    sizes = jnp.array(case.group_sizes, jnp.int32)
    return jnp.asarray(x, dtype), jnp.asarray(w_gate_up), jnp.asarray(w_down), sizes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case: Case) -> None:
    inputs = make_inputs(case)
    expected = np.asarray(expert_mlp(*inputs, backend="reference"), np.float32)
    actual = jax.jit(lambda *a: expert_mlp(*a, backend="xla"))(*inputs)
    assert actual.shape == expected.shape
    assert actual.dtype == jnp.dtype(case.dtype)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=tolerance, rtol=tolerance)
