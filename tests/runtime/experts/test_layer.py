"""The expert layer against a loop over tokens and experts in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router.spec import RouterSpec
from runtime.experts.layer import moe_layer
from runtime.experts.router import route
from runtime.experts.weights import MoEParams
from runtime.model.architecture import from_hf_config
from runtime.model.params import init_params
from tests.runtime.model.builders import QWEN3_CONFIG

ARCH = from_hf_config(QWEN3_CONFIG)


def slow_layer(params: MoEParams, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for token, experts in enumerate(ids):
        for choice, expert in enumerate(experts):
            gate, up = np.split(np.asarray(params.w_gate_up[expert]) @ x[token], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            out[token] += weights[token, choice] * (np.asarray(params.w_down[expert]) @ hidden)
    return out


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_agrees_with_a_loop_and_skips_padding(num_tokens: int, top_k: int) -> None:
    params = init_params(ARCH, jnp.float32, seed=5).layers[0].ffn
    assert isinstance(params, MoEParams)
    rng = np.random.default_rng(top_k)
    x = rng.standard_normal((num_tokens, ARCH.hidden_size)).astype(np.float32)
    is_real = rng.random(num_tokens) < 0.6
    spec = RouterSpec(top_k, renormalise=True)
    layer = jax.jit(partial(moe_layer, routing=spec, activation="silu"))
    out, load = layer(params, jnp.asarray(x), jnp.asarray(is_real))
    routing = route(params.router, jnp.asarray(x), jnp.asarray(is_real), spec)
    ids, weights = np.asarray(routing.expert_ids), np.asarray(routing.weights)
    expected = np.where(is_real[:, None], slow_layer(params, x, ids, weights), 0)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert load.tokens.tolist() == np.bincount(ids[is_real].ravel(), minlength=ARCH.num_experts).tolist()
    assert load.rows.tolist() == [load.tokens.sum()]


def test_padding_may_hold_anything() -> None:
    params = init_params(ARCH, jnp.float32, seed=5).layers[0].ffn
    x = jnp.ones((3, ARCH.hidden_size)).at[1].set(jnp.nan)
    is_real = jnp.array([True, False, True])
    out, load = moe_layer(params, x, is_real, routing=RouterSpec(2), activation="silu")
    assert np.isfinite(np.asarray(out)[[0, 2]]).all()
    assert load.tokens.sum() == 4
