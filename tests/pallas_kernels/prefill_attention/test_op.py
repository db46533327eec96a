"""Prefill attention: the reference against decode attention token by token, XLA's form against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import MODEL_SHAPES
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.prefill_attention.cases import CASES, Case, aot_case, make_inputs
from pallas_kernels.prefill_attention.op import choose_prefill_attention, prefill_attention


def real_places(case: Case) -> np.ndarray:
    """Flat places that hold a token, in order."""
    places = [s + np.arange(n) for s, n in zip(case.row_start, case.row_len, strict=True)]
    return np.concatenate(places).astype(np.int64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case: Case) -> None:
    inputs = make_inputs(case)
    out = np.asarray(prefill_attention(**inputs, backend="xla"))
    want = np.asarray(prefill_attention(**inputs, backend="reference"))
    places = real_places(case)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[places], want[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("window", [None, 20])
def test_equals_decoding_token_by_token(backend: str, window: int | None) -> None:
    case = Case(
        *("tokens", (70, 17, 3), (32, 0, 80), 128, 4, 2, 8, 16, 8),
        **{"window": window, "soft_cap": 3.0, "has_sinks": True, "dtype": "float32"},
    )
    inputs = make_inputs(case)
    out = np.asarray(prefill_attention(**inputs, backend=backend))
    rows = np.repeat(np.arange(3), case.row_len)
    offsets = np.concatenate([np.arange(n) for n in case.row_len])
    places = real_places(case)
    decoded = paged_attention(
        inputs["q"][places],
        jnp.nan_to_num(inputs["pages"]),
        inputs["page_table"][rows],
        jnp.asarray(np.array(case.context_len)[rows] + offsets + 1, jnp.int32),
        **{name: inputs[name] for name in ("window", "sinks", "soft_cap")},
        backend="reference",
    )
    np.testing.assert_allclose(out[places], decoded, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named() -> None:
    good = make_inputs(CASES[0])

    def refused(match: str, **changed: object) -> None:
        with pytest.raises(ValueError, match=match):
            prefill_attention(**{**good, **changed})

    refused("pages has shape", pages=good["pages"][:, :1])
    refused("row_start is float32", row_start=good["row_start"].astype(jnp.float32))
    refused("row_len is int32", row_len=jnp.zeros(2, jnp.int32))
    refused("context_len is int32", context_len=jnp.zeros(2, jnp.int32))
    refused("window is -3", window=-3)


def test_xla_is_chosen_with_the_reason_why_not_the_kernel() -> None:
    inputs = make_inputs(Case("float32", (1,), (0,), 64, dtype="float32"))
    choice = choose_prefill_attention(inputs["q"], inputs["pages"])
    assert choice.name == "xla"
    assert "not mosaic: takes pages of bfloat16, got float32" in choice.reason
    with pytest.raises(NotImplementedError, match="takes pages of bfloat16"):
        prefill_attention(**inputs, backend="mosaic")


def test_models_have_a_case_that_the_kernel_takes() -> None:
    for model in MODEL_SHAPES:
        case = aot_case(model, num_tokens=128, num_rows=2)
        assert jax.eval_shape(case.function, *case.args) == case.args[0]
