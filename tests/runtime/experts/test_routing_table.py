"""Tables of routing seen before: what they learn, and that the layer asks them only for what they know."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router.spec import RouterSpec
from runtime.experts.layer import moe_layer
from runtime.experts.routing_table import RoutingTable, SeenRouting, build_table
from runtime.experts.weights import MoEParams

SEEN = SeenRouting(
    tokens=np.array([3, 3, 3, 5, 5]),
    expert_ids=np.array([[1, 2], [2, 1], [0, 1], [0, 2], [1, 2]]),
    weights=np.array([[0.6, 0.4], [0.8, 0.2], [0.5, 0.5], [0.9, 0.1], [0.7, 0.3]], np.float32),
)


def known(table: RoutingTable) -> list[int]:
    return np.flatnonzero(np.asarray(table.is_known)).tolist()


def test_a_fixed_table_has_every_token_s_most_frequent_set_and_its_mean_weights() -> None:
    table = build_table(SEEN, 8)
    assert known(table) == [3, 5]
    assert table.expert_ids[3].tolist() == [1, 2]  # in whichever order it came
    np.testing.assert_allclose(table.weights[3], [(0.6 + 0.2) / 2, (0.4 + 0.8) / 2])


def test_a_cache_knows_frequent_and_steady_tokens_only() -> None:
    assert known(build_table(SEEN, 8, min_count=3)) == [3]
    assert known(build_table(SEEN, 8, min_share=0.6)) == [3]
    assert known(build_table(SEEN, 8, min_share=0.7)) == []
    nothing = SeenRouting(np.zeros(0, int), np.zeros((0, 2), int), np.zeros((0, 2)))
    assert known(build_table(nothing, 8)) == []


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"min_share is 1\.5"):
        build_table(SEEN, 8, min_share=1.5)
    with pytest.raises(ValueError, match="min_count is 0"):
        build_table(SEEN, 8, min_count=0)
    with pytest.raises(ValueError, match="a token is 3 or 5, expected 0 to 4"):
        build_table(SEEN, 5)


def test_the_layer_takes_the_table_s_experts_where_it_knows_the_token() -> None:
    rng = np.random.default_rng(0)
    router, w_gate_up, w_down, x = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((3, 8), (3, 8, 8), (3, 8, 4), (4, 8))
    )
    tokens, is_real = jnp.array([3, 0, 3, 5], jnp.int32), jnp.array([True, True, False, True])

    def run(table: RoutingTable | None, tokens: jnp.ndarray | None) -> tuple[np.ndarray, list[int]]:
        params = MoEParams(router, w_gate_up, w_down, routing_table=table)
        out, load = moe_layer(params, x, is_real, routing=RouterSpec(2), activation="silu", tokens=tokens)
        return np.asarray(out), np.asarray(load.tokens).tolist()

    plain, counts = run(None, tokens)

    def expert(e: int) -> np.ndarray:
        gate, up = np.split(np.asarray(w_gate_up[e] @ x[0]), 2)
        return np.asarray(w_down[e]) @ (gate / (1 + np.exp(-gate)) * up)

    table = build_table(SEEN, 8)
    np.testing.assert_array_equal(run(table, None)[0], plain)  # nobody said which tokens
    out, table_counts = run(table, tokens)
    np.testing.assert_array_equal(out[1], plain[1])  # token 0 was never seen
    assert not out[2].any()
    np.testing.assert_allclose(
        out[0], 0.4 * expert(1) + 0.6 * expert(2), rtol=1e-4
    )  # and not the router's weights
    assert sum(table_counts) == sum(counts) == 6
