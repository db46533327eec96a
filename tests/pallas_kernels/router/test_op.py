"""Every backend of the router against a plain float64 computation, ties included; checks and the choice of backend."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backend import choosing_for_hopper
from pallas_kernels.router.cases import CASES, DEEPSEEK_V2, DEEPSEEK_V3, PLAIN, Case, make_inputs
from pallas_kernels.router.op import choose_router, router
from pallas_kernels.router.spec import RouterSpec


def in_float64(
    logits: np.ndarray, bias: np.ndarray | None, spec: RouterSpec
) -> tuple[np.ndarray, np.ndarray]:
    """(weights, expert ids), one token at a time, as the papers have it. Ties go to the lower group and expert."""
    weights, ids = [], []
    for z in logits.astype(np.float64):
        scores = (
            np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            if spec.score == "softmax"
            else 1 / (1 + np.exp(-z))
        )
        choice = scores if bias is None else scores + bias
        width = len(z) // spec.num_groups
        groups = choice.reshape(spec.num_groups, width)
        group_score = [sum(sorted(g)[-spec.num_group_best :]) if width > 1 else g[0] for g in groups]
        kept = sorted(range(spec.num_groups), key=lambda g: (-group_score[g], g))[: spec.num_kept_groups]
        allowed = [e for e in range(len(z)) if e // width in kept]
        best = sorted(allowed, key=lambda e: (-choice[e], e))[: spec.top_k]
        chosen = scores[best]
        weights.append((chosen / chosen.sum() if spec.renormalise else chosen) * spec.scale)
        ids.append(best)
    return np.array(weights), np.array(ids)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_float64(case: Case, backend: str) -> None:
    logits, is_real, bias = make_inputs(case)
    got = router(logits, is_real, case.spec, bias=bias, backend=backend)
    weights, ids = in_float64(np.asarray(logits), None if bias is None else np.asarray(bias), case.spec)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    real = ids[np.asarray(is_real)]
    np.testing.assert_array_equal(got.counts, np.bincount(real.ravel(), minlength=case.num_experts))


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(st.lists(st.integers(-2, 2), min_size=8, max_size=8), min_size=3, max_size=3),
    bias=st.lists(st.integers(-1, 1), min_size=8, max_size=8),
    kept=st.integers(1, 4),
    best=st.integers(1, 2),
)
def test_ties_go_to_the_lower_group_and_the_lower_expert(
    logits: list[list[int]], bias: list[int], kept: int, best: int
) -> None:
    """With five different logits and three biases nearly every choice is a tie, exact in any precision."""
    spec = RouterSpec(2, "sigmoid", num_groups=4, num_kept_groups=kept, num_group_best=best)
    z, b = np.array(logits, np.float32), np.array(bias, np.float32)
    # scores of equal logits are equal; sums of a score and an integer are compared in the precision of the op
    scores = np.asarray(1 / (1 + np.exp(-z.astype(np.float64))), np.float32)
    got = router(jnp.asarray(z), jnp.ones(3, bool), spec, bias=jnp.asarray(b), backend="xla")
    same = router(jnp.asarray(z), jnp.ones(3, bool), spec, bias=jnp.asarray(b), backend="reference")
    np.testing.assert_array_equal(got.expert_ids, same.expert_ids)
    chosen = np.take_along_axis(scores, np.asarray(got.expert_ids), axis=1)
    np.testing.assert_allclose(got.weights, chosen, rtol=1e-6)
    value = np.take_along_axis(scores + b[None, :], np.asarray(got.expert_ids), axis=1)
    ids = np.asarray(got.expert_ids)
    assert (
        (np.diff(value, axis=1) < 1e-6) & ((np.diff(value, axis=1) < -1e-6) | (np.diff(ids, axis=1) > 0))
    ).all()


def test_defaults_mean_a_plain_top_k() -> None:
    logits, is_real, _ = make_inputs(CASES[0])
    got = router(logits, is_real, RouterSpec(2))
    no_bias = router(logits, is_real, RouterSpec(2), bias=jnp.zeros(16))
    grouped = router(logits, is_real, RouterSpec(2, num_groups=4, num_kept_groups=4))
    for other in (no_bias, grouped):
        np.testing.assert_array_equal(got.expert_ids, other.expert_ids)
        np.testing.assert_array_equal(got.weights, other.weights)


def test_no_tokens() -> None:
    got = router(jnp.zeros((0, 8)), jnp.zeros(0, bool), PLAIN)
    assert (got.weights.shape, got.expert_ids.shape, got.counts.tolist()) == ((0, 2), (0, 2), [0] * 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"score": "tanh"}, "score is 'tanh'"),
        ({"top_k": 0}, "top_k is 0, expected 1 to 4"),
        ({"top_k": 5}, "top_k is 5, expected 1 to 4"),
        ({"num_groups": 3}, "num_groups is 3, no divisor of the 8 experts"),
        ({"num_kept_groups": 5}, "num_kept_groups is 5, expected 1 to num_groups, 4"),
        ({"num_kept_groups": 0}, "num_kept_groups is 0"),
        ({"num_group_best": 3}, "num_group_best is 3"),
        ({"num_groups": 8, "top_k": 1}, "num_group_best is 2, expected 1 or 2 and at most the 1 experts"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_a_spec_that_does_not_fit_is_named(changed: dict, message: str) -> None:
    spec = replace(RouterSpec(2, num_groups=4, num_kept_groups=2), **changed)
    with pytest.raises(ValueError, match=message):
        router(jnp.zeros((3, 8)), jnp.ones(3, bool), spec)


def test_bad_operands_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits is int32\(3, 8\)"):
        router(jnp.zeros((3, 8), jnp.int32), jnp.ones(3, bool), PLAIN)
    with pytest.raises(ValueError, match=r"is_real is float32\(3,\)"):
        router(jnp.zeros((3, 8)), jnp.ones(3), PLAIN)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\), expected \(8,\)"):
        router(jnp.zeros((3, 8)), jnp.ones(3, bool), PLAIN, bias=jnp.zeros(7))


def test_the_choice_of_a_backend_has_its_reason() -> None:
    with choosing_for_hopper():
        assert choose_router(jnp.zeros((1, 256)), DEEPSEEK_V3).name == "mosaic"
        for num_experts, spec, reason in (
            (160, DEEPSEEK_V2, "takes groups of a multiple of 8 experts, got 160 in 8 groups"),
            (60, PLAIN, "takes groups of a multiple of 8 experts, got 60 in 1 groups"),
            (384, PLAIN, "takes at most 256 experts, got 384"),
        ):
            choice = choose_router(jnp.zeros((1, num_experts)), spec)
            assert (choice.name, f"not mosaic: {reason}" in choice.reason) == ("xla", True)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        router(jnp.zeros((1, 8)), jnp.ones(1, bool), PLAIN, backend="mosaic")
