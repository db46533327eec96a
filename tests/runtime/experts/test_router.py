"""Top-k of a softmax, with and without rescaling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router.spec import RouterSpec
from runtime.experts.router import route

# One token a row; the router is the identity, so these are the logits.
LOGITS = np.log(np.array([[1, 2, 3, 4], [8, 1, 1, 6], [1, 5, 2, 2]], np.float32))


def route_logits(top_k: int, norm_topk_prob: bool) -> tuple[np.ndarray, np.ndarray]:
    spec = RouterSpec(top_k, renormalise=norm_topk_prob)
    routing = route(jnp.eye(4), jnp.asarray(LOGITS), jnp.ones(3, bool), spec)
    return np.asarray(routing.expert_ids), np.asarray(routing.weights)


def test_rescaled_weights_sum_to_one() -> None:
    ids, weights = route_logits(2, norm_topk_prob=True)
    assert ids.tolist() == [[3, 2], [0, 3], [1, 2]]  # a tie goes to the lower expert
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7], [8 / 14, 6 / 14], [5 / 7, 2 / 7]], rtol=1e-5)


def test_plain_weights_are_shares_of_all_experts() -> None:
    _, weights = route_logits(2, norm_topk_prob=False)
    np.testing.assert_allclose(weights, [[0.4, 0.3], [0.5, 0.375], [0.5, 0.2]], rtol=1e-5)


@pytest.mark.parametrize("rescaled", [True, False])
def test_top_one_and_all_experts(rescaled: bool) -> None:
    ids, weights = route_logits(1, rescaled)
    assert ids.ravel().tolist() == [3, 0, 1]
    assert weights.shape == (3, 1)
    ids, weights = route_logits(4, rescaled)
    assert np.sort(ids, axis=1).tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(2),
        RouterSpec(3, renormalise=True),
        RouterSpec(4, score="sigmoid", renormalise=True, num_groups=4, num_kept_groups=2, scale=2.5),
    ],
)
def test_a_bias_of_zeros_changes_no_bit(spec) -> None:
    """Several devices always have one, so that leaning compiles nothing."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, (64, 16)), jnp.float32)  # with ties
    router = jnp.asarray(rng.standard_normal((16, 16)), jnp.float32).at[3].set(0).at[7].set(0)
    is_real = jnp.asarray(rng.random(64) < 0.8)
    plain, biased = (
        jax.jit(partial(route, spec=spec))(router, x, is_real, bias=b) for b in (None, jnp.zeros(16))
    )
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(biased), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_bias_steers_the_choice_and_not_the_weight() -> None:
    spec = RouterSpec(1)
    routing = route(jnp.eye(4), jnp.asarray(LOGITS), jnp.array([True, True, False]), spec, bias=jnp.eye(4)[2])
    assert np.asarray(routing.expert_ids).ravel().tolist() == [2, 2, 2]
    np.testing.assert_allclose(routing.weights.ravel(), [0.3, 1 / 16, 0.2], rtol=1e-5)
    assert routing.counts.tolist() == [0, 0, 2, 0]
