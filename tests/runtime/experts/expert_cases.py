"""Loads and placements that the tests of the experts' host side share."""

import numpy as np
from hypothesis import strategies as st

from runtime.experts.balancer import SlotShape
from runtime.experts.placement import ExpertPlacement

# The example in the README of deepseek-ai/EPLB: two layers, 12 experts, 16 slots, 4 groups, 2 nodes, 8 devices.
EPLB_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=float,
)
EPLB_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def zipf(num_layers: int = 3, num_experts: int = 64, exponent: float = 0.8, seed: int = 0) -> np.ndarray:
    """Zipf loads [L, E] of 10,000 rows a layer, permuted per layer."""
    rng = np.random.default_rng(seed)
    loads = np.arange(1, num_experts + 1) ** -exponent
    loads *= 10_000 / loads.sum()
    return np.stack([loads[rng.permutation(num_experts)] for _ in range(num_layers)])


@st.composite
def shapes_and_loads(draw):
    """A shape that is valid, hierarchical at times, and loads of any skew with zeros and ties among them."""
    nodes = draw(st.sampled_from([1, 1, 2, 3]))
    devices = nodes * draw(st.integers(1, 4))
    groups_of_node, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = nodes * groups_of_node
    experts = groups * width
    of_node = experts // nodes
    fewest = -(-of_node // (devices // nodes))
    slots = draw(st.integers(fewest, min(of_node, fewest + 3)))
    shape = SlotShape(experts, devices, slots, groups, nodes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = rng.random((draw(st.integers(1, 3)), experts)) ** draw(st.sampled_from([0.0, 1.0, 8.0]))
    loads[rng.random(loads.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return shape, loads


def device_of_slot(placement: ExpertPlacement) -> np.ndarray:
    return np.arange(placement.num_slots) // placement.slots_per_device
