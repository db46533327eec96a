"""The C++ kernel against the float32 reference: every split of rows, odd widths, threads, loops, and what it must not read."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_mlp.cases import CASES, Case
from pallas_kernels.expert_mlp.native import expert_mlp_native
from pallas_kernels.expert_mlp.op import expert_mlp, pack_expert_weights
from pallas_kernels.expert_mlp.reference import ACTIVATIONS
from pallas_kernels.native.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"native: {unavailable()}")

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
EVERY_SPLIT = (*range(18), 28, 29, 32, 33, 45, 48, 64, 77, 80)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    e, d, f = case.num_experts, case.d, case.f
    x = rng.standard_normal((case.num_rows, d), dtype=np.float32)
    gate, up = rng.standard_normal((2, e, f, d), dtype=np.float32) * d**-0.5
    down = rng.standard_normal((e, d, f), dtype=np.float32) * f**-0.5
    w_gate_up, w_down = pack_expert_weights(*(w.astype(jnp.bfloat16) for w in (gate, up, down)))
    sizes = jnp.array(case.group_sizes, jnp.int32)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w_gate_up), jnp.asarray(w_down), sizes


def native(*inputs: jax.Array, activation: str = "silu", max_threads: int = 0) -> jax.Array:
    return jax.jit(partial(expert_mlp_native, activation=activation, max_threads=max_threads))(*inputs)


def assert_equals_reference(inputs: Inputs, activation: str = "silu") -> None:
    expected = expert_mlp(*inputs, activation=activation, backend="reference")
    actual = native(*inputs, activation=activation)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bfloat16"], ids=lambda case: case.name)
def test_equals_reference(case: Case, activation: str) -> None:
    assert_equals_reference(make_inputs(case), activation)


@pytest.mark.parametrize(
    ("d", "f"), [(64, 32), (40, 24), (33, 7), (1, 1), (2, 2), (31, 64), (64, 31), (1030, 6)]
)
def test_every_split_of_rows_at_every_width(d: int, f: int) -> None:
    assert_equals_reference(make_inputs(Case("splits", EVERY_SPLIT, num_padding=5, d=d, f=f)))


def test_wide_layers_are_cut_into_many_items() -> None:
    assert_equals_reference(make_inputs(Case("wide", (1, 0, 40, 5, 13), d=512, f=264)))


# In float64 and without cancellation in the tails, which the float32 formulas of JAX have.
EXACT = {
    "silu": lambda x: x * math.exp(min(x, 0)) / (1 + math.exp(-abs(x))),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + math.exp(min(700, -2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("as_panels", [False, True])
def test_activations_at_large_and_tiny_values(activation: str, as_panels: bool) -> None:
    """Widths of one or two columns: the result is the activation itself, rounded twice."""
    values = np.concatenate([np.linspace(-12, 12, 97), [-100.0, -88.0, 100.0, 1e-3, -1e-3, 0.0]])
    width = 2 if as_panels else 1  # an odd width cannot be packed into panels
    x = jnp.zeros((len(values), width), jnp.bfloat16).at[:, 0].set(values.astype(jnp.bfloat16))
    w_gate_up = jnp.zeros((1, 2 * width, width), jnp.bfloat16).at[0, ::width, 0].set(1)
    w_down = jnp.zeros((1, width, width), jnp.bfloat16).at[0, 0, 0].set(1)
    actual = native(x, w_gate_up, w_down, jnp.array([len(values)], jnp.int32), activation=activation)
    gate = [float(v) for v in np.asarray(x[:, 0], np.float64)]
    expected = [EXACT[activation](v) * v for v in gate]
    np.testing.assert_allclose(np.asarray(actual[:, 0], np.float64), expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("group_sizes", [(3, 0, 9, 1), (1, 0, 1, 0), (0, 0, 70, 0), (14, 0, 0, 0)])
def test_unused_experts_and_padding_rows_are_never_read(group_sizes: tuple[int, ...]) -> None:
    x, w_gate_up, w_down, sizes = make_inputs(Case("poisoned", group_sizes, num_padding=13))
    expected = native(x, w_gate_up, w_down, sizes)
    unused, num_rows = np.asarray(group_sizes) == 0, sum(group_sizes)
    actual = native(
        x.at[num_rows:].set(jnp.nan),
        w_gate_up.at[unused].set(jnp.nan),
        w_down.at[unused].set(jnp.nan),
        sizes,
    )
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.asarray(actual[num_rows:], np.float32), 0.0)


def test_a_nan_stays_in_its_row() -> None:
    x, *rest = make_inputs(Case("mixed", (5, 40, 3)))
    clean = np.asarray(native(x, *rest), np.float32)
    poisoned = np.asarray(native(x.at[20].set(jnp.nan), *rest), np.float32)
    assert np.isnan(poisoned[20]).all()
    np.testing.assert_array_equal(np.delete(poisoned, 20, 0), np.delete(clean, 20, 0))


@pytest.mark.parametrize("sizes", [(5, 1000), (-3, 4), (2**31 - 1, 2**31 - 1), (-(2**31), 0)])
def test_sizes_that_do_not_fit_never_leave_the_buffers(sizes: tuple[int, int]) -> None:
    x, w_gate_up, w_down, _ = make_inputs(Case("wrong", (4, 4)))
    y = native(x, w_gate_up, w_down, jnp.array(sizes, jnp.int32))
    assert bool(jnp.isfinite(y.astype(jnp.float32)).all())


def test_the_number_of_threads_changes_nothing() -> None:
    inputs = make_inputs(Case("mixed", EVERY_SPLIT, d=256, f=128))
    alone, together = native(*inputs, max_threads=1), native(*inputs)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(together, np.float32))


def test_inside_a_loop_with_a_donated_carry() -> None:
    x, *rest = make_inputs(Case("loop", (7, 0, 30, 3), num_padding=4))

    @partial(jax.jit, donate_argnums=0)
    def loop(x: jax.Array, *rest: jax.Array) -> jax.Array:
        body = lambda state: (state[0] + 1, expert_mlp_native(state[1], *rest, "silu"))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    expected = x
    for _ in range(3):
        expected = native(expected, *rest)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(np.asarray(loop(jnp.copy(x), *rest), np.float32), expected)


def test_two_threads_may_call_at_once() -> None:
    inputs = [make_inputs(Case("mixed", EVERY_SPLIT, d=64, f=32), seed) for seed in range(2)]
    expected = [np.asarray(native(*i), np.float32) for i in inputs]

    def call(seed: int) -> list[np.ndarray]:
        return [np.asarray(native(*inputs[seed]), np.float32) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for seed, results in enumerate(pool.map(call, range(2))):
            for result in results:
                np.testing.assert_array_equal(result, expected[seed])


def test_no_rows() -> None:
    x, w_gate_up, w_down, sizes = make_inputs(Case("none", (0, 0)))
    assert native(x, w_gate_up, w_down, sizes).shape == (0, 32)


def test_it_is_what_the_op_chooses_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LADDER_DISABLE_BACKENDS", raising=False)
    inputs = make_inputs(CASES[0])
    assert "moe_ladder_expert_mlp" in jax.jit(expert_mlp).lower(*inputs).as_text()
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float32"):
        expert_mlp(inputs[0].astype(jnp.float32), *inputs[1:], backend="native")
