"""The published balancer, for comparison: greedy copies and greedy packing, as DeepSeek describes its EPLB.

Own implementation from the description (github.com/deepseek-ai/EPLB, README): groups of experts are packed on nodes, the
expert with the highest load per copy gets the next spare slot of its node, and copies are packed on the node's devices;
each packing gives the heaviest item left to the lightest bin that has room. Hierarchical where the groups divide over the
nodes, else the same with one group on one node. Nothing stops two copies of an expert from sharing a device, so the result
is a slot table and not an `ExpertPlacement`. `balancer.py` is what the server uses.
"""

import numpy as np


def greedy_slots(
    loads: np.ndarray, num_devices: int, slots_per_device: int, num_groups: int = 1, num_nodes: int = 1
) -> np.ndarray:
    """int32 [L, S]: the expert of each slot for loads [L, E]."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = loads.shape
    by_group = loads.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups = pack_greedily(by_group, num_nodes)  # [L, nodes, groups of a node]
    width = num_experts // num_groups
    experts = (groups[..., None] * width + np.arange(width)).reshape(num_layers * num_nodes, -1)  # [L*N, E/N]
    node_loads = np.take_along_axis(np.repeat(loads, num_nodes, axis=0), experts, axis=1)
    devices_of_node = num_devices // num_nodes
    held, counts = _copy_greedily(node_loads, devices_of_node * slots_per_device)
    weights = np.take_along_axis(node_loads / counts, held, axis=1)
    packed = pack_greedily(weights, devices_of_node).reshape(len(experts), -1)
    slots = np.take_along_axis(experts, np.take_along_axis(held, packed, axis=1), axis=1)
    return slots.reshape(num_layers, -1).astype(np.int32)


def pack_greedily(weights: np.ndarray, num_bins: int) -> np.ndarray:
    """[b, bins, n / bins]: the items of each bin, for weights [b, n]; ties go to the lower bin."""
    num_rows, num_items = weights.shape
    room = num_items // num_bins
    rows = np.arange(num_rows)
    order = np.argsort(-weights, axis=1, kind="stable")
    filled = np.zeros((num_rows, num_bins))
    counts = np.zeros((num_rows, num_bins), np.int64)
    packed = np.zeros((num_rows, num_bins, room), np.int64)
    for item in order.T:
        chosen = np.where(counts < room, filled, np.inf).argmin(axis=1)
        packed[rows, chosen, counts[rows, chosen]] = item
        counts[rows, chosen] += 1
        filled[rows, chosen] += weights[rows, item]
    return packed


def _copy_greedily(loads: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts [b, num_slots] with the copies last, and the copies of each [b, E]."""
    num_rows, num_experts = loads.shape
    rows = np.arange(num_rows)
    counts = np.ones((num_rows, num_experts), np.int64)
    held = np.tile(np.arange(num_slots), (num_rows, 1))
    for slot in range(num_experts, num_slots):
        hottest = (loads / counts).argmax(axis=1)
        held[:, slot] = hottest
        counts[rows, hottest] += 1
    return held, counts
