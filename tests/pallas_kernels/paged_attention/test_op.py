"""Decode attention: the reference against a softmax over plain arrays, XLA's form against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.cases import CASES, MODEL_SHAPES, Case, aot_case, make_inputs
from pallas_kernels.paged_attention.op import choose_paged_attention, paged_attention

PAGE, KV_HEADS, HEADS, DIM = 16, 2, 4, 8
LENGTHS = [0, 1, 64, 65, 128, 151]  # an empty row, and both sides of where blocks end


def softmax_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row: q [H, Dh], keys and values [K, T, Dh]."""
    keys, values = (np.repeat(a, HEADS // KV_HEADS, axis=0) for a in (keys, values))
    scores = np.einsum("hd,htd->ht", q, keys) * DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@pytest.mark.parametrize(("backend", "is_large"), [("xla", False), ("xla", True), ("reference", False)])
@pytest.mark.parametrize("window", [None, 70])
def test_equals_softmax_over_the_row(
    monkeypatch: pytest.MonkeyPatch, backend: str, is_large: bool, window: int | None
) -> None:
    monkeypatch.setattr(xla, "LARGE_TURN", 0 if is_large else 2**62)
    rng = np.random.default_rng(0)
    pages_a_row = 10
    shape = (len(LENGTHS), KV_HEADS, pages_a_row * PAGE, DIM)
    keys, values = rng.standard_normal((2, *shape)).astype(np.float32)
    for row, length in enumerate(LENGTHS):  # what lies past the end is stale, and must not reach a result
        keys[row, :, length:] = values[row, :, length:] = np.nan
    # [B, 2, K, P, S, Dh] to pages: page 0 is the dummy, the others are dealt out in a random order
    kv = np.stack([keys, values], axis=1).reshape(len(LENGTHS), 2, KV_HEADS, pages_a_row, PAGE, DIM)
    table = 1 + rng.permutation(len(LENGTHS) * pages_a_row).reshape(len(LENGTHS), pages_a_row)
    pages = np.full((table.size + 1, 2, KV_HEADS, PAGE, DIM), np.nan, np.float32)
    pages[table] = kv.transpose(0, 3, 1, 2, 4, 5)
    q = rng.standard_normal((len(LENGTHS), HEADS, DIM)).astype(np.float32)

    arrays = jnp.asarray(q), jnp.asarray(pages), jnp.asarray(table), jnp.array(LENGTHS)
    out = paged_attention(*arrays, window=window, backend=backend)

    assert not out[0].any()
    for row, length in enumerate(LENGTHS[1:], start=1):
        seen = slice(0 if window is None else max(0, length - window), length)
        want = softmax_attention(q[row], keys[row, :, seen], values[row, :, seen])
        np.testing.assert_allclose(out[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case: Case) -> None:
    inputs = make_inputs(case)
    out = paged_attention(**inputs, backend="xla")
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, paged_attention(**inputs, backend="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_sinks_and_soft_cap_on_numbers_written_down(backend: str) -> None:
    """Two keys with scores 0 and 3 before the cap; the sink's score is log 2, so it weighs as much as two zeros."""
    pages = (
        jnp.zeros((1, 2, 1, 16, 1)).at[0, 0, 0, 1].set(3.0).at[0, 1, 0, 0].set(1.0).at[0, 1, 0, 1].set(5.0)
    )
    arrays = jnp.ones((1, 1, 1)), pages, jnp.zeros((1, 1), jnp.int32), jnp.array([2])
    capped = np.exp(2.0 * np.tanh(1.5))
    out = paged_attention(
        *arrays, window=None, sinks=jnp.log(jnp.array([2.0])), soft_cap=2.0, backend=backend
    )
    np.testing.assert_allclose(out, [[[(1 + 5 * capped) / (1 + capped + 2)]]], rtol=1e-5)
    out = paged_attention(*arrays, window=None, backend=backend)
    np.testing.assert_allclose(out, [[[(1 + 5 * np.exp(3)) / (1 + np.exp(3))]]], rtol=1e-5)


def test_only_large_turns_on_cpu_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = jnp.zeros((1, 2, 8, 16, 64))
    for platform, want in (("cpu", [128, 128, 64, 64]), ("gpu", [128] * 4)):
        monkeypatch.setattr(xla.jax, "default_backend", lambda name=platform: name)
        assert [xla.keys_a_turn(rows, pages) for rows in (1, 8, 16, 32)] == want


def test_bad_arguments_are_named() -> None:
    good = make_inputs(CASES[0])

    def refused(match: str, **changed: object) -> None:
        with pytest.raises(ValueError, match=match):
            paged_attention(**{**good, **changed})

    refused("q has shape", q=good["q"][0])
    refused("expected .*, 32", q=good["q"][:, :, :32])
    refused("no multiple of the 2 kv heads", q=good["q"][:, :3])
    refused("page_table is float32", page_table=good["page_table"].astype(jnp.float32))
    refused("page_table has 2 rows, q 1", page_table=jnp.zeros((2, 4), jnp.int32))
    refused("kv_len is int32", kv_len=jnp.zeros((1, 1), jnp.int32))
    refused("window is 0", window=0)
    refused("soft_cap is -1", soft_cap=-1.0)
    refused("soft_cap is nan", soft_cap=float("nan"))
    refused("sinks has shape", sinks=jnp.zeros(3))
    refused("cuda", backend="cuda")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "float32"}, "takes pages of bfloat16, got float32"),
        ({"head_dim": 80}, "takes a head size in"),
        ({"page_size": 48}, "takes pages of 16, 32 or a multiple of 64 tokens, got 48"),
        ({"num_heads": 130}, "takes at most 64 heads a kv head, got 65"),
        ({}, "needs a Hopper GPU"),
    ],
)
def test_xla_is_chosen_with_the_reason_why_not_the_kernel(changed: dict, reason: str) -> None:
    case = Case("any", (1,), **changed)
    inputs = make_inputs(case)
    choice = choose_paged_attention(inputs["q"], inputs["pages"])
    if changed or jax.default_backend() == "cpu":
        assert choice.name == "xla"
        assert f"not mosaic: {reason}" in choice.reason
        with pytest.raises(NotImplementedError, match=reason):
            paged_attention(**inputs, backend="mosaic")


def test_models_have_a_case_that_the_kernel_takes() -> None:
    cases = [aot_case(model, num_rows=2) for model in MODEL_SHAPES]
    assert len({case.name for case in cases}) == len(MODEL_SHAPES)
    for case in cases:
        assert jax.eval_shape(case.function, *case.args) == case.args[0]
