"""How many nodes a token's experts are spread over, with and without the balancer's affinity. Imports no JAX.

Needs token-wise routing. Placements are made from the first half of each task's tokens and judged on the second.
"""

from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.expert_loads import NUM_RECORDED_EXPERTS, TASKS
from runtime.experts.balancer import SlotShape, node_experts

NUM_DEVICES = 8


def nodes_of_tokens(routing: Path) -> list[dict[str, Any]]:
    """By number of nodes: mean nodes a token and the imbalance of the nodes, by load alone and by affinity too."""
    halves = [np.array_split(_ids(routing, task), 2) for task in TASKS]
    made, judged = (np.concatenate(half) for half in zip(*halves, strict=True))
    chosen = _chosen(made)
    loads = chosen.sum(axis=1)
    affinity = chosen.swapaxes(1, 2) @ chosen
    found = []
    for num_nodes in (2, 4):
        shape = SlotShape(NUM_RECORDED_EXPERTS, NUM_DEVICES, 9, NUM_RECORDED_EXPERTS, num_nodes)
        row: dict[str, Any] = {"nodes": num_nodes}
        for name, together in (("by_load", None), ("by_affinity", affinity)):
            nodes = node_experts(loads, shape, together)  # [L, nodes, E / nodes]
            row[name] = _judge(nodes, judged)
        found.append(row)
    return found


def _judge(nodes: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Of a table of experts by node [L, N, E / N], on routing [tokens, L, k]."""
    num_layers, num_nodes, width = nodes.shape
    node_of = np.empty((num_layers, NUM_RECORDED_EXPERTS), np.int64)
    node = np.repeat(np.arange(num_nodes), width)
    np.put_along_axis(
        node_of, nodes.reshape(num_layers, -1), np.broadcast_to(node, (num_layers, node.size)), axis=1
    )
    visited = node_of[np.arange(num_layers)[None, :, None], ids]  # [tokens, L, k]
    is_on = (visited[..., None] == np.arange(num_nodes)).any(axis=2)
    rows = (visited[..., None] == np.arange(num_nodes)).sum(axis=(0, 2))  # [L, N]
    return {
        "nodes_of_a_token": round(float(is_on.sum(axis=2).mean()), 3),
        "imbalance_of_nodes": round(float((rows.max(axis=1) / rows.mean(axis=1) - 1).mean()), 4),
    }


def _ids(routing: Path, task: str) -> np.ndarray:
    with np.load(routing / f"esft_routing_{task}.npz", allow_pickle=False) as file:
        return file["expert_ids"].astype(np.int64)


def _chosen(ids: np.ndarray) -> np.ndarray:
    """float32 [L, tokens, E]: one where the token chose the expert."""
    chosen = np.zeros((ids.shape[1], len(ids), NUM_RECORDED_EXPERTS), np.float32)
    np.put_along_axis(chosen, ids.swapaxes(0, 1), 1, axis=2)
    return chosen
