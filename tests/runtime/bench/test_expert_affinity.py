"""Experts that tokens choose together end up on one node, and fewer nodes are visited."""

import numpy as np

from runtime.bench.expert_affinity import nodes_of_tokens
from runtime.bench.expert_loads import TASKS


def test_tokens_visit_fewer_nodes(tmp_path):
    rng = np.random.default_rng(0)
    family = rng.permutation(64).reshape(8, 8)
    for task in TASKS:
        chosen = family[
            rng.integers(8, size=(400, 2))
        ]  # each token and layer takes its six from one family of eight
        ids = np.take_along_axis(chosen, rng.random((400, 2, 8)).argsort(axis=2)[..., :6], axis=2)
        np.savez(tmp_path / f"esft_routing_{task}.npz", expert_ids=ids.astype(np.uint8))
    for row in nodes_of_tokens(tmp_path):
        assert row["by_affinity"]["nodes_of_a_token"] < 1.3
        assert row["by_load"]["nodes_of_a_token"] > 1.6
        assert row["by_affinity"]["imbalance_of_nodes"] < 0.2
