"""The replay judges policies by what they held before a step, and bounds bound."""

import argparse

import numpy as np
import pytest

from runtime.bench import residency
from runtime.bench.residency_replay import (
    POLICIES,
    Traffic,
    recorded_traffic,
    replay,
    side_by_side,
)

LAYERS, EXPERTS, SLOTS = 2, 64, 4


def traffic(steps: list[list[int]], rows: int = 1, first: tuple[int, ...] = (0,)) -> Traffic:
    counts = np.zeros((len(steps), LAYERS, EXPERTS), np.int64)
    for step, wanted in enumerate(steps):
        counts[step][:, wanted] = 1
    return Traffic("made", rows, counts, first)


def held(name: str, found: Traffic) -> list[set[int]]:
    return [set(np.flatnonzero(resident[0]).tolist()) for resident in POLICIES[name](found, SLOTS)]


def test_every_policy_starts_with_the_first_experts_and_knows_no_step_before_it() -> None:
    made = traffic([[9], [9], [9]])
    for name in POLICIES:
        if name != "best_of_step":  # the bound that knows
            assert held(name, made)[0] == {0, 1, 2, 3}
    assert 9 in held("lru", made)[1]
    assert 9 in held("own", made)[1]
    assert 9 in held("best_of_step", made)[0]


def test_lru_keeps_what_was_wanted_last_and_the_clairvoyant_what_comes_next() -> None:
    made = traffic([[5, 6, 7, 8], [9], [5, 9], [6], [5, 7, 8]])
    assert held("lru", made)[2] >= {9}
    assert held("lru", made)[4] == {9, 5, 6} | (held("lru", made)[4] & {7, 8})
    assert held("clairvoyant", made)[2] >= {5, 6}


def test_the_clairvoyant_fetches_least_and_the_best_of_the_step_hits_most() -> None:
    rng = np.random.default_rng(0)
    weights = np.arange(1, 17) ** -1.0
    steps = [rng.choice(16, 3, replace=False, p=weights / weights.sum()).tolist() for _ in range(400)]
    made = traffic(steps, rows=64, first=(0, 200))
    figures = replay(made, SLOTS)["policies"]
    for name, found in figures.items():
        assert figures["best_of_step"]["hit_rate"] >= found["hit_rate"]
        if name != "best_of_step":
            assert figures["clairvoyant"]["fetches_per_layer_step"] <= found["fetches_per_layer_step"]
    assert figures["own"]["hit_rate"] > 0.3


def test_a_static_list_does_not_follow_a_change_and_the_own_set_does() -> None:
    made = traffic([[4, 5, 6, 7]] * 150 + [[8, 9, 10, 11]] * 150, rows=16, first=(0, 150))
    figures = replay(made, SLOTS)["policies"]
    assert figures["static_first_window"]["hit_rate_before_changes"] == 1
    assert figures["static_first_window"]["hit_rate_after_changes"] == 0
    assert figures["own"]["hit_rate_before_changes"] == 1
    assert figures["own"]["hit_rate_after_changes"] > 0.6


def test_streams_go_side_by_side() -> None:
    ids = np.arange(7, dtype=np.uint8)[:, None, None] + np.zeros((7, 1, 1), np.uint8)
    counts = side_by_side(ids, 2)  # tokens 0 1 2 and 3 4 5; the seventh has no partner
    assert [np.flatnonzero(step[0]).tolist() for step in counts] == [[0, 3], [1, 4], [2, 5]]


def test_the_excerpt_is_replayed() -> None:
    (found,) = recorded_traffic(None, (4,))
    assert found.counts.shape == (194, 26, EXPERTS)
    assert found.first_of_task == (0, 64, 128)


@pytest.mark.parametrize("rounds", [0, 1001])
def test_rounds_are_bounded(rounds) -> None:
    args = argparse.Namespace(routing=None, rounds=rounds, dtype="bf16", no_engine=True)
    with pytest.raises(ValueError, match=f"--rounds must be in .1, 1000., not {rounds}"):
        residency.run(args)


def test_the_report_says_what_was_not_measured() -> None:
    result = residency.run(argparse.Namespace(routing=None, rounds=1, dtype="bf16", no_engine=True))
    assert result["settings"]["not_run_on_a_gpu"]
    assert result["settings"]["host_and_device_are_one_memory"]
    assert result["bound_h200"]["expert_us"]["qwen3-30b-a3b"] == pytest.approx(149.8, abs=0.1)
    assert result["engine"] is None
