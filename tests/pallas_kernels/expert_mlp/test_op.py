"""The op against its reference, and what it must never touch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import choose_backend
from pallas_kernels.expert_mlp import xla
from pallas_kernels.expert_mlp.cases import CASES, Case, ModelShape
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


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_routed_tokens(num_tokens: int, top_k: int) -> None:
    shape = ModelShape("tiny", num_experts=8, top_k=top_k, d=64, f=32)
    sizes = tuple(int(n) for n in shape.routed_group_sizes(num_tokens, seed=top_k))
    test_equals_reference(Case("routed", sizes, d=64, f=32))


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 8), (4,), (32, 128)])
def test_every_block_size_gives_the_same(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "choose_block_sizes", lambda num_rows, num_experts: sizes)
    test_equals_reference(Case("mixed", (1, 0, 9, 2, 130, 0, 8, 3), num_padding=7))


@pytest.mark.parametrize("group_sizes", [(3, 0, 9, 1), (1, 0, 1, 0), (0, 0, 70, 0)])
def test_unused_experts_and_padding_rows_are_never_read(group_sizes: tuple[int, ...]) -> None:
    """NaN in both would reach the result through any product that touched them."""
    case = Case("poisoned", group_sizes, num_padding=13)
    x, w_gate_up, w_down, sizes = make_inputs(case)
    expected = expert_mlp(x, w_gate_up, w_down, sizes, backend="reference")
    unused = np.asarray(group_sizes) == 0
    num_rows = sum(group_sizes)
    actual = expert_mlp(
        x.at[num_rows:].set(jnp.nan),
        w_gate_up.at[unused].set(jnp.nan),
        w_down.at[unused].set(jnp.nan),
        sizes,
        backend="xla",
    )
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=2e-2, rtol=2e-2
    )
    np.testing.assert_array_equal(np.asarray(actual[num_rows:], np.float32), 0.0)


@pytest.mark.parametrize("num_rows", [4, 32, 256])
def test_cost_does_not_grow_with_the_number_of_experts(num_rows: int) -> None:
    """No product over all experts, no copy of all weights: temporaries stay below the weights of four experts."""
    e, d, f = 64, 256, 128
    x = jax.ShapeDtypeStruct((num_rows, d), jnp.bfloat16)
    w_gate_up = jax.ShapeDtypeStruct((e, 2 * f, d), jnp.bfloat16)
    w_down = jax.ShapeDtypeStruct((e, d, f), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((e,), jnp.int32)
    compiled = jax.jit(lambda *a: expert_mlp(*a, backend="xla")).lower(x, w_gate_up, w_down, sizes).compile()
    shapes_of_dots = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", compiled.as_text())
    assert all(shape.count(",") == 1 for shape in shapes_of_dots), shapes_of_dots
    assert "ragged" not in compiled.as_text()
    one_expert = 3 * d * f * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * one_expert + 8 * num_rows * d * 4


def test_plan_blocks_example() -> None:
    blocks = xla.plan_blocks(jnp.array([9, 0, 1], jnp.int32), num_rows=10, sizes=(1, 8))
    assert int(blocks.count) == 3
    assert blocks.expert[:3].tolist() == [0, 0, 2]
    assert blocks.first_row[:3].tolist() == [0, 8, 9]
    assert blocks.size_index[:3].tolist() == [1, 0, 0]


def test_bad_arguments_are_named() -> None:
    x, w_gate_up, w_down, sizes = make_inputs(CASES[0])
    with pytest.raises(ValueError, match="last axes"):
        expert_mlp(x[:, :-1], w_gate_up, w_down, sizes)
    with pytest.raises(ValueError, match="w_down"):
        expert_mlp(x, w_gate_up, w_down[:, :-1], sizes)
    with pytest.raises(ValueError, match="group_sizes"):
        expert_mlp(x, w_gate_up, w_down, sizes[:-1])
    with pytest.raises(ValueError, match="relu"):
        expert_mlp(x, w_gate_up, w_down, sizes, activation="relu")
    with pytest.raises(ValueError, match="cuda"):
        expert_mlp(x, w_gate_up, w_down, sizes, backend="cuda")


def test_the_choice_of_backend_has_a_reason() -> None:
    choice = choose_backend(("mosaic", "xla", "reference"))
    if jax.default_backend() == "cpu":
        assert choice.name == "xla"
        assert "not mosaic: needs a Hopper GPU" in choice.reason
