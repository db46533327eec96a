"""Absorbed latent attention: against the attention that it absorbs, XLA's form against the reference, checks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import choosing_for_hopper
from pallas_kernels.mla_attention.cases import CASES, Case, aot_case, make_inputs
from pallas_kernels.mla_attention.op import choose_mla_attention, mla_attention


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_equals_the_reference(case: Case) -> None:
    inputs = make_inputs(replace(case, dtype="float32"))
    out = np.asarray(mla_attention(**inputs, backend="xla"))
    want = np.asarray(mla_attention(**inputs, backend="reference"))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert not out[np.array(case.kv_len) == 0].any()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_equals_the_attention_that_it_absorbs(backend: str) -> None:
    """Keys and values of every head written out from the latents, as a model's formulas have them."""
    heads, latent, rotary, nope, value, keys = 3, 8, 4, 6, 5, 11
    rng = np.random.default_rng(0)
    w_k, w_v = rng.standard_normal((heads, nope, latent)), rng.standard_normal((heads, value, latent))
    q_nope, q_rope = rng.standard_normal((heads, nope)), rng.standard_normal((heads, rotary))
    c, k_rope = rng.standard_normal((keys, latent)), rng.standard_normal((keys, rotary))
    scale = (nope + rotary) ** -0.5
    scores = (np.einsum("hn,hnc,tc->ht", q_nope, w_k, c) + q_rope @ k_rope.T) * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    expected = np.einsum("ht,hvc,tc->hv", weights, w_v, c)

    q = np.concatenate([np.einsum("hn,hnc->hc", q_nope, w_k), q_rope], axis=1)
    pages = np.zeros((4, 4, latent + rotary))
    pages[[3, 1, 2]] = np.pad(np.concatenate([c, k_rope], axis=1), ((0, 1), (0, 0))).reshape(3, 4, -1)
    mixed = mla_attention(
        jnp.asarray(q[None], jnp.float32),
        jnp.asarray(pages, jnp.float32),
        jnp.array([[3, 1, 2, 0]], jnp.int32),
        jnp.array([keys], jnp.int32),
        num_latent=latent,
        scale=scale,
        backend=backend,
    )
    np.testing.assert_allclose(np.einsum("hvc,hc->hv", w_v, mixed[0]), expected, rtol=2e-4, atol=1e-5)


def test_the_choice_has_its_reason() -> None:
    def choice(shape: tuple[int, ...], num_latent: int, dtype: str = "bfloat16") -> tuple[str, str]:
        with choosing_for_hopper():
            found = choose_mla_attention(jax.ShapeDtypeStruct(shape, dtype), num_latent)
        return found.name, found.reason

    assert choice((9, 64, 576), 512)[0] == "mosaic"
    for args, reason in (
        (((9, 64, 576), 512, "float32"), "takes pages of bfloat16, got float32"),
        (((9, 8, 576), 512), "takes pages of 16, 32 or a multiple of 64 tokens, got 8"),
        (((9, 64, 576), 384), "got 384 of 576"),
        (((9, 64, 1536), 512), "takes keys whose tile fits"),
    ):
        name, why = choice(*args)
        assert (name, reason in why) == ("xla", True)


def test_bad_arguments_are_named() -> None:
    good = make_inputs(CASES[0])

    def refused(match: str, **changed: object) -> None:
        with pytest.raises(ValueError, match=match):
            mla_attention(**{**good, **changed})

    refused("pages has shape|pages", pages=good["pages"][..., 1:])
    refused("num_latent is 129, expected 1 to 128", num_latent=129)
    refused("kv_len is float32", kv_len=good["kv_len"].astype(jnp.float32))
    refused("page_table is float32", page_table=good["page_table"].astype(jnp.float32))
    refused("page_table has 2 rows, q 1", page_table=jnp.zeros((2, 4), jnp.int32))
    refused("scale is -1.0", scale=-1.0)
    refused("scale is nan", scale=float("nan"))


def test_the_model_s_shape_is_one_that_the_kernel_takes() -> None:
    case = aot_case(num_rows=4)
    assert jax.eval_shape(case.function, *case.args).shape == (4, 128, 512)
