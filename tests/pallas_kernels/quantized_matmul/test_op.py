"""The op by XLA against the reference and against unquantised weights; checks and the choice of backend."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import choosing_for_hopper
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.quantized_matmul.cases import CASES, KINDS, Case, make_floats, make_inputs
from pallas_kernels.quantized_matmul.op import choose_quantized_matmul, quantized_matmul
from pallas_kernels.quantized_matmul.quantise import QuantizedRows, QuantizedWeights, quantise_outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_equals_the_reference_and_ignores_padding(case: Case) -> None:
    x, w, sizes = make_inputs(case)
    num_real = sum(case.group_sizes)
    want = np.asarray(quantized_matmul(x, w, sizes, gate=case.gate, backend="reference"), np.float32)
    if isinstance(x, QuantizedRows):
        x = QuantizedRows(x.values, x.scales.at[:, num_real:].set(jnp.nan))
    got = np.asarray(quantized_matmul(x, w, sizes, gate=case.gate, backend="xla"), np.float32)
    np.testing.assert_allclose(got, want, atol=1e-2, rtol=1e-2)
    assert not got[num_real:].any()


@pytest.mark.parametrize(("kind", "bound"), [("blocks", 0.05), ("int8", 0.02), ("e4m3", 0.04)])
def test_the_error_against_unquantised_products(kind: str, bound: float) -> None:
    """Relative root mean square: e4m3 keeps 3 bits of mantissa, on both sides where there are blocks."""
    case = Case("", (40, 0, 24), kind)
    x, w, sizes = make_floats(case)
    exact = np.asarray(grouped_matmul_reference(x.astype(jnp.float32), w, sizes))
    _, quantised, _ = make_inputs(case)
    got = np.asarray(quantized_matmul(x, quantised, sizes), np.float32)
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert bound / 4 < error < bound


@pytest.mark.parametrize("kind", KINDS)
def test_hopper_takes_all_kinds_where_blocks_fit(kind: str) -> None:
    _, w, _ = make_inputs(Case("", (1,), kind))
    with choosing_for_hopper():
        assert choose_quantized_matmul(w).name == "mosaic"
    assert "needs a Hopper GPU" in choose_quantized_matmul(w).reason
    odd = quantise_outputs(jnp.ones((1, 64, 96)), jnp.int8)
    with choosing_for_hopper():
        choice = choose_quantized_matmul(odd)
    assert (choice.name, "not mosaic: takes multiples of 128, the contraction is 96" in choice.reason) == (
        "xla",
        True,
    )


def test_bad_operands_are_named() -> None:
    x, w, sizes = make_inputs(Case("", (3, 1)))
    floats = jnp.zeros((4, 256), jnp.bfloat16)
    int8 = quantise_outputs(jnp.ones((2, 128, 256)), jnp.int8)
    assert isinstance(x, QuantizedRows)
    for args, options, message in (
        ((floats[:, 1:], w, sizes), {}, r"\(4, 255\)"),
        ((x, int8, sizes), {}, "w has no scales for blocks"),
        (
            (QuantizedRows(x.values, x.scales[1:]), w, sizes),
            {},
            r"scales of shape \(1, 4\), expected \(2, 4\)",
        ),
        ((floats, QuantizedWeights(w.values, w.scales[:, :, 1:]), sizes), {}, r"expected \(2, 1, 2\)"),
        ((floats, QuantizedWeights(int8.values, w.scales), sizes), {}, "int8 without blocks"),
        ((floats, QuantizedWeights(floats[None], int8.scales), sizes), {}, "w is bfloat16"),
        ((floats, w, sizes[1:]), {}, "group_sizes"),
        ((floats, w, sizes), {"gate": "relu"}, "'relu'"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_matmul(*args, **options)


def test_no_rows() -> None:
    _, w, _ = make_inputs(Case("", (3, 1)))
    y = quantized_matmul(jnp.zeros((0, 256), jnp.bfloat16), w, jnp.zeros(2, jnp.int32))
    assert y.shape == (0, 128)
