"""Residency: books that always add up, bounded swaps, and a set that follows traffic without trembling."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.residency import Residency, ResidencyReason, ResidencySettings

LAYERS, EXPERTS, SLOTS = 2, 8, 3
NEVER_SLEEP = ResidencySettings(sleep_after_s=1e9, max_swaps=100)


def make(num_slots: int = SLOTS, half_life: float = 4.0, num_layers: int = LAYERS) -> Residency:
    return Residency(num_layers, EXPERTS, num_slots, start_s=0.0, half_life_steps=half_life)


def tokens(*wanted: int, num: int = 1, num_layers: int = LAYERS) -> np.ndarray:
    counts = np.zeros((num_layers, EXPERTS), np.int64)
    counts[:, list(wanted)] = num
    return counts


def residents(residency: Residency, layer: int = 0) -> set[int]:
    return set(residency.expert_of_slot[layer].tolist()) - {-1}


def assert_books(residency: Residency) -> None:
    for slots, table in zip(residency.expert_of_slot, residency.slot_of_expert, strict=True):
        held = slots[slots >= 0]
        assert len(set(held.tolist())) == len(held)  # no expert in two slots
        expected = np.full(EXPERTS, -1)
        expected[held] = np.flatnonzero(slots >= 0)
        np.testing.assert_array_equal(table, expected)


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS),
        st.integers(0, 16),  # decode steps of the launch
        st.floats(0, 5),  # seconds since the one before
        st.integers(0, 5),  # swaps allowed
    ),
    max_size=30,
)


@given(steps, st.integers(1, EXPERTS), st.floats(0, 2), st.floats(0.5, 10))
@settings(max_examples=60, deadline=None)
def test_books_add_up_whatever_comes(history, num_slots, margin, sleep_after) -> None:
    residency, now, slots = make(num_slots), 0.0, None
    for counts, num_steps, gap, max_swaps in history:
        now += gap
        residency.observe(np.reshape(counts, (LAYERS, EXPERTS)), num_steps, now)
        slots = residency.expert_of_slot.copy()
        change = residency.decide(ResidencySettings(sleep_after, max_swaps, margin))
        assert_books(residency)
        assert len(change.wakes) <= max_swaps
        for layer, expert in change.slept:
            slots[layer][slots[layer] == expert] = -1
        for wake in change.wakes:  # told in the order in which they can be carried out
            held = slots[wake.layer, wake.slot]
            assert wake.evicted == (None if held < 0 else held)
            slots[wake.layer, wake.slot] = wake.expert
        np.testing.assert_array_equal(slots, residency.expert_of_slot)
        assert residency.decide(NEVER_SLEEP).wakes == ()  # nothing new was seen


def test_the_set_follows_traffic_when_it_shifts() -> None:
    """What was hot for long gives way within a few half-lives: no expert is hot by decree."""
    residency = make()
    for wanted in ((5, 6, 7), (0, 3, 5), (1, 2, 4)):
        for step in range(24):
            residency.observe(tokens(*wanted), 1, float(step))
            residency.decide(NEVER_SLEEP)
        assert residents(residency, 0) == residents(residency, 1) == set(wanted)


def test_layers_are_apart() -> None:
    residency, counts = make(), tokens()
    counts[1, 6] = 3
    for _ in range(4):
        residency.observe(counts, 1, 1.0)
        residency.decide(NEVER_SLEEP)
    assert residents(residency, 0) == {0, 1, 2}
    assert 6 in residents(residency, 1)


def test_two_experts_do_not_take_turns_in_one_slot() -> None:
    """A wanted every other step, B in between: without a margin each would evict the other for ever."""
    swaps = {}
    for margin in (0.0, 0.5):
        residency, swaps[margin], kept = make(num_slots=1, num_layers=1, half_life=8.0), 0, 0
        for step in range(100):
            residency.observe(tokens(step % 2, num_layers=1), 1, float(step))
            change = residency.decide(ResidencySettings(1e9, 4, margin))
            if step >= 20:
                swaps[margin] += len(change.wakes)
                kept += change.num_kept
        assert (kept > 0) == (margin > 0)
    assert swaps[0.0] >= 40
    assert swaps[0.5] == 0


def test_many_rows_of_one_step_count_little_and_steps_of_a_burst_each() -> None:
    """A fetch serves all rows of a step; of a launch with several steps each would have fetched."""
    residency = make(num_slots=1, num_layers=1)
    for _ in range(3):
        residency.observe(tokens(4, num_layers=1), 1, 0.0)
        residency.observe(tokens(5, num=64, num_layers=1), 1, 0.0)
        residency.observe(tokens(4, num_layers=1), 1, 0.0)
    residency.decide(NEVER_SLEEP)
    assert residents(residency) == {4}
    residency.observe(tokens(6, num=64, num_layers=1), 8, 0.0)
    residency.decide(NEVER_SLEEP)
    assert residents(residency) == {6}


def test_what_nobody_wants_falls_asleep_while_others_work_and_wakes_without_a_margin() -> None:
    residency = make()
    sleepy = ResidencySettings(sleep_after_s=10.0, max_swaps=4, wake_margin=16.0)

    def work(until_s: int, *wanted: int) -> tuple[tuple[int, int], ...]:
        slept = ()
        for now_s in range(int(residency._seen_s) + 1, until_s + 1):
            residency.observe(tokens(*wanted), 1, float(now_s))
            slept += residency.decide(sleepy).slept
        return slept

    assert work(5, 0, 1) == ()
    assert work(11, 0) == ((0, 2), (1, 2))
    assert work(16, 0) == ((0, 1), (1, 1))
    assert residency.num_resident == LAYERS
    residency.observe(tokens(0, 7), 1, 17.0)
    change = residency.decide(sleepy)
    assert {(w.layer, w.expert, w.evicted) for w in change.wakes} == {(0, 7, None), (1, 7, None)}
    assert residency.num_resident == 2 * LAYERS


def test_an_idle_server_puts_nothing_to_sleep() -> None:
    residency = make()
    residency.observe(tokens(0, 1, 2), 1, 1.0)
    residency.decide(NEVER_SLEEP)
    residency.observe(tokens(), 1, 1e6)  # a warm-up, or a launch of padding
    assert residency.decide(ResidencySettings(sleep_after_s=10.0)).slept == ()
    assert residency.num_resident == LAYERS * SLOTS


def test_the_first_step_after_a_pause_puts_nothing_to_sleep() -> None:
    """A pause is no traffic that experts went without: before the start, after it, and again."""
    residency = make()
    for now_s in (3600.0, 3600.1, 7200.0, 1e6):
        residency.observe(tokens(0), 1, now_s)
        assert residency.decide(ResidencySettings(sleep_after_s=10.0)).slept == ()
    assert residency.num_resident == LAYERS * SLOTS


def test_of_few_swaps_the_most_wanted_come_first() -> None:
    residency, counts = make(), tokens()
    counts[0, 5], counts[1, 6], counts[1, 7] = 1, 4, 2
    residency.observe(counts, 4, 0.0)
    change = residency.decide(ResidencySettings(max_swaps=2))
    assert [(w.layer, w.expert) for w in change.wakes] == [(1, 6), (1, 7)]
    assert change.layers == (1,)


def test_all_resident_never_changes() -> None:
    residency = make(num_slots=EXPERTS)
    for step in range(20):
        residency.observe(tokens(step % EXPERTS), 1, float(step))
        assert residency.decide(NEVER_SLEEP).wakes == ()


@pytest.mark.parametrize("num_slots", [0, 9])
def test_slots_that_do_not_fit_are_refused(num_slots) -> None:
    with pytest.raises(ValueError, match=f"{num_slots} slots for 8 experts"):
        make(num_slots)


@pytest.mark.parametrize("wrong", [{"sleep_after_s": 0}, {"max_swaps": -1}, {"wake_margin": float("nan")}])
def test_settings_that_mean_nothing_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="expected sleep_after_s > 0"):
        ResidencySettings(**wrong)


def test_reasons_are_told_by_their_names() -> None:
    assert {r.value for r in ResidencyReason} == {"woke", "evicted", "slept", "kept_by_hysteresis"}
