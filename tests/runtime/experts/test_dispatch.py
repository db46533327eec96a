"""Sorting by expert and back, on answers small enough to write down."""

import jax.numpy as jnp
import numpy as np
import pytest

from runtime.experts.dispatch import combine, permute, plan_dispatch
from runtime.experts.router import Routing


def test_example_of_the_docstring() -> None:
    expert_ids = jnp.array([[2, 0], [1, 0], [0, 2]], jnp.int32)
    dispatch = plan_dispatch(expert_ids, jnp.array([True, False, True]), num_experts=3)
    assert dispatch.pair_of_row.tolist() == [1, 4, 0, 5, 2, 3]
    assert dispatch.row_of_pair.tolist() == [2, 0, 4, 5, 1, 3]
    assert dispatch.group_sizes.tolist() == [2, 0, 2]
    x = jnp.array([[10.0], [11.0], [12.0]])
    assert permute(dispatch, x, top_k=2).ravel().tolist() == [10, 12, 10, 12, 11, 11]


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 2), (16, 8)])
def test_groups_are_sorted_and_complete(num_tokens: int, num_experts: int, top_k: int) -> None:
    rng = np.random.default_rng(num_tokens + num_experts)
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    is_real = rng.random(num_tokens) < 0.7
    dispatch = plan_dispatch(jnp.asarray(ids), jnp.asarray(is_real), num_experts)
    expected = np.bincount(ids[is_real].ravel(), minlength=num_experts)
    assert dispatch.group_sizes.tolist() == expected.tolist()
    sorted_experts = ids.ravel()[np.asarray(dispatch.pair_of_row)][: expected.sum()]
    assert sorted_experts.tolist() == np.repeat(np.arange(num_experts), expected).tolist()
    np.testing.assert_array_equal(
        np.asarray(dispatch.pair_of_row)[np.asarray(dispatch.row_of_pair)], np.arange(ids.size)
    )


def test_combine_weighs_each_token_s_experts() -> None:
    expert_ids = jnp.array([[2, 0], [0, 1]], jnp.int32)
    dispatch = plan_dispatch(expert_ids, jnp.array([True, True]), num_experts=3)
    y = permute(dispatch, jnp.array([[1.0, 2.0], [10.0, 20.0]]), top_k=2)  # experts that change nothing
    routing = Routing(expert_ids, jnp.array([[0.5, 0.25], [1.0, 2.0]]))
    assert combine(dispatch, routing, y).tolist() == [[0.75, 1.5], [30.0, 60.0]]


def test_a_sort_key_that_would_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        plan_dispatch(jnp.zeros((1 << 16, 8), jnp.int32), jnp.ones(1 << 16, bool), num_experts=4096)
