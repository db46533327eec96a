"""Copies for pairs: never worse than what was given, and better where a copy's partner is what counts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.balancer import SlotShape, balance, choose_copies
from runtime.experts.pairing import choose_copies_in_pairs
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads
from tests.runtime.experts.expert_cases import zipf


def heaviest_pair(loads, copies):
    """Of one layer, by putting the heaviest with the lightest."""
    slots = sorted(load / n for load, n in zip(loads, copies, strict=True) for _ in range(n))
    return max(a + b for a, b in zip(slots, reversed(slots), strict=True))


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(4, 3), (5, 4), (6, 5), (8, 4)]), st.sampled_from([1.0, 4.0])
)
@settings(deadline=None, max_examples=60)
def test_between_what_was_given_and_the_best_there_is(seed, shape, skew):
    num_experts, num_devices = shape
    loads = np.random.default_rng(seed).random((2, num_experts)) ** skew
    given_copies = choose_copies(loads, 2 * num_devices, num_devices)
    copies = choose_copies_in_pairs(loads, given_copies, num_devices)
    assert (copies.sum(axis=1) == 2 * num_devices).all()
    assert copies.min() >= 1
    assert copies.max() <= num_devices
    for layer in range(2):
        every = itertools.product(range(1, num_devices + 1), repeat=num_experts)
        best = min(heaviest_pair(loads[layer], c) for c in every if sum(c) == 2 * num_devices)
        found = heaviest_pair(loads[layer], copies[layer])
        assert best * (1 - 1e-9) <= found <= heaviest_pair(loads[layer], given_copies[layer]) * (1 + 1e-9)


def test_a_cold_expert_is_split_to_make_light_partners():
    """A second copy of a 10 leaves the other 10 beside the 1; half of the 1 beside each of them is lighter."""
    loads = np.array([[10.0, 10, 4, 4, 1]])
    by_load = choose_copies(loads, 6, 3)
    assert heaviest_pair(loads[0], by_load[0]) == 11
    copies = choose_copies_in_pairs(loads, by_load, 3)
    assert copies[0].tolist() == [1, 1, 1, 1, 2]
    assert heaviest_pair(loads[0], copies[0]) == 10.5


def test_packing_reaches_the_heaviest_pair_that_copies_were_chosen_for():
    loads = zipf(8, 256)
    copies = choose_copies(loads, 288, 144)
    chosen = choose_copies_in_pairs(loads, copies, 144)
    tops = device_loads(balance(loads, SlotShape(256, 144, 2)), loads).max(axis=1)
    for layer, top in enumerate(tops):
        assert top == pytest.approx(heaviest_pair(loads[layer], chosen[layer]))


def test_a_pair_of_one_expert_is_never_what_a_placement_is_chosen_for():
    """In pairs two copies of an expert may meet, which no placement may have; then the copies by load stand."""
    loads = np.array([[187.0, 86, 16, 27, 64, 19]])
    published = [[4, 5], [2, 0], [0, 1], [0, 3]]
    top = device_loads(balance(loads, SlotShape(6, 4, 2)), loads).max()
    assert top <= device_loads(ExpertPlacement(np.array(published).reshape(1, -1), 4, 6), loads).max()


def test_layers_are_chosen_for_alone():
    loads = np.random.default_rng(0).random((6, 40)) ** 4
    copies = choose_copies(loads, 48, 24)
    together = choose_copies_in_pairs(loads, copies, 24)
    alone = [choose_copies_in_pairs(loads[i : i + 1], copies[i : i + 1], 24)[0] for i in range(6)]
    assert together.tolist() == np.array(alone).tolist()
