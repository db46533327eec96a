"""The Hopper backend of the experts' product, interpreted; when it is chosen, and when another steps in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import choose_backend, choosing_for_hopper
from pallas_kernels.expert_mlp.mosaic import choose_tiles, expert_mlp_mosaic, unfit_for_expert_mlp
from pallas_kernels.expert_mlp.op import IMPLEMENTATIONS, expert_mlp
from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.interpret import interpret_params

pytestmark = pytest.mark.usefixtures("no_races")

D, F = 128, 64
SWAPPED = TileConfig(8, 64, 64, 2, swap=True)
NORMAL = TileConfig(64, 64, 64, 2)


def make_inputs(group_sizes: tuple[int, ...], num_padding: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    e = len(group_sizes)
    x = rng.standard_normal((sum(group_sizes) + num_padding, D), dtype=np.float32)
    w_gate_up = rng.standard_normal((e, 2 * F, D), dtype=np.float32) * 2 * D**-0.5
    w_down = rng.standard_normal((e, D, F), dtype=np.float32) * 2 * F**-0.5
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (x, w_gate_up, w_down)]
    return *arrays, jnp.array(group_sizes, jnp.int32)


@pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
@pytest.mark.parametrize(
    ("group_sizes", "num_padding"),
    [((0, 1, 0), 0), ((3, 0, 9, 1), 5), ((0, 70, 0), 0), ((8, 8, 8), 0)],
    ids=["one row", "empty experts and padding", "one hot expert", "even"],
)
def test_equals_the_reference(group_sizes: tuple[int, ...], num_padding: int, tile: TileConfig) -> None:
    x, w_gate_up, w_down, sizes = make_inputs(group_sizes, num_padding)
    expected = np.asarray(expert_mlp(x, w_gate_up, w_down, sizes, backend="reference"), np.float32)
    num_real, unused = sum(group_sizes), np.asarray(group_sizes) == 0
    actual = expert_mlp_mosaic(
        x.at[num_real:].set(jnp.nan),
        w_gate_up.at[unused].set(jnp.nan),
        w_down.at[unused].set(jnp.nan),
        sizes,
        "silu",
        tiles=(tile, tile),
        interpret=interpret_params(),
    )
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=3e-2, rtol=2e-2)
    np.testing.assert_array_equal(np.asarray(actual[num_real:], np.float32), 0.0)


def test_the_suggested_tiles_run() -> None:
    x, w_gate_up, w_down, sizes = make_inputs((2, 0, 1))
    expected = np.asarray(expert_mlp(x, w_gate_up, w_down, sizes, backend="reference"), np.float32)
    actual = expert_mlp_mosaic(x, w_gate_up, w_down, sizes, "silu", interpret=interpret_params())
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=3e-2, rtol=2e-2)


def test_the_two_tiles_share_their_rows() -> None:
    x, w_gate_up, w_down, sizes = make_inputs((2, 1))
    with pytest.raises(ValueError, match="the tiles have 64 and 8"):
        expert_mlp_mosaic(x, w_gate_up, w_down, sizes, "silu", tiles=(NORMAL, SWAPPED))
    gated, plain = choose_tiles(4096 * 8, (128, 2048, 768))
    assert gated.rows == plain.rows


@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "reason"),
    [
        ((64, 32), jnp.bfloat16, "silu", "multiples of 64, the outputs is 32"),
        ((96, 64), jnp.bfloat16, "silu", "multiples of 64, the contraction is 96"),
        ((64, 64), jnp.float32, "silu", "takes bfloat16, x is float32"),
        ((64, 64), jnp.bfloat16, "gelu", "has no 'gelu'"),
    ],
)
def test_what_does_not_fit_goes_to_xla_with_the_reason(shape, dtype, activation, reason) -> None:
    d, f = shape
    shapes = ((4, d), (2, 2 * f, d), (2, d, f))
    x, w_gate_up, w_down = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
    found = unfit_for_expert_mlp(x, w_gate_up, w_down, activation)
    assert found is not None
    assert reason in found
    with choosing_for_hopper():
        choice = choose_backend(tuple(IMPLEMENTATIONS), unfit={"mosaic": found})
        sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
        traced = jax.make_jaxpr(lambda *a: expert_mlp(*a, activation=activation))(x, w_gate_up, w_down, sizes)
    assert choice.name == "xla"
    assert f"not mosaic: {found}" in choice.reason
    assert "mosaic_gpu" not in str(traced)


def test_a_hopper_gpu_runs_the_kernel_and_a_cpu_says_why_it_does_not() -> None:
    args = make_inputs((2, 1))
    with choosing_for_hopper():
        assert choose_backend(tuple(IMPLEMENTATIONS)).name == "mosaic"
        lowered = jax.jit(expert_mlp).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2
    with pytest.raises(NotImplementedError, match="mosaic: needs a Hopper GPU"):
        expert_mlp(*args, backend="mosaic")
