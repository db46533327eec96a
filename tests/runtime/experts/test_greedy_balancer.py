"""The published algorithm: the published example, and the flaw that the server's own balancer has not."""

import numpy as np

from runtime.experts.balancer import SlotShape, balance
from runtime.experts.greedy_balancer import greedy_slots
from tests.runtime.experts.expert_cases import EPLB_LOADS, EPLB_SLOTS, zipf


def test_the_published_example():
    assert greedy_slots(EPLB_LOADS, 8, 2, num_groups=4, num_nodes=2).tolist() == EPLB_SLOTS


def test_groups_that_do_not_divide_over_nodes_are_packed_globally():
    assert np.array_equal(greedy_slots(EPLB_LOADS, 8, 2, 3, 2), greedy_slots(EPLB_LOADS, 8, 2))


def test_it_puts_copies_of_one_expert_on_one_device():
    loads = zipf(8, 256)
    held = np.sort(greedy_slots(loads, 32, 9).reshape(8, 32, 9), axis=2)
    assert (held[..., 1:] == held[..., :-1]).any()
    balance(loads, SlotShape(256, 32, 9))  # would raise
