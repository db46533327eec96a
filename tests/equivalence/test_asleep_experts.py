"""Experts that sleep change no text: fetched ahead or late, and woken or put to sleep while requests run."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from runtime.adaptive.decision import DecisionLog
from runtime.engine.device_commands import SetSlots, WakeWeights
from runtime.engine.expert_residency import ExpertResidency
from runtime.errors import ModelLoadError
from runtime.experts.residency import AsleepColumn
from runtime.ladder.late_compiles import monitor
from tests.engine_driver import EngineDriver, request

PROMPTS = [np.random.RandomState(i).randint(0, 128, 3 + i * 37 % 50).tolist() for i in range(24)]
SMALL = {"decode_rows": [8], "prefill_tokens": [64], "max_decode_steps": 4}
SLOTS, EXPERTS, LAYERS = 3, 8, 2


def start(**experts) -> EngineDriver:
    return EngineDriver(experts=experts, ladder=SMALL, batch_processing={"max_batch_size": 8})


def batch(tag: str, num: int = 24, **params):
    return [request(f"{tag}-{i}", p, **({"max_tokens": 12} | params)) for i, p in enumerate(PROMPTS[:num])]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    driver = start()
    try:
        texts = driver.run(batch("all"))
        assert driver.residency is None
        assert driver.steps[-1][1].asleep is None
        return texts
    finally:
        driver.close()


@pytest.fixture(scope="module")
def part() -> Iterator[EngineDriver]:
    options = {"swaps_per_step": 2, "wake_margin": 0.0, "sleep_after": "1s"}
    driver = start(resident_experts=SLOTS, prefetch_experts=2, **options)
    monitor.arm()
    yield driver
    assert monitor.num_late == 0
    monitor.disarm()
    driver.close()


def serve(driver: EngineDriver, tag: str, between: Callable[[], None]) -> list[list[int]]:
    driver.steps.clear()
    driver.scheduler.clear_prefix_cache()
    sequences = [driver.scheduler.add(r) for r in batch(tag)]
    while not driver.scheduler.is_idle:
        between()
        driver.turn()
    return [s.output_ids for s in sequences]


def test_text_is_that_of_all_resident_while_experts_wake_by_traffic(part, expected) -> None:
    clock, decisions, told = count(0.0, 0.05).__next__, DecisionLog(256), 0
    assert part.residency is not None
    residency = ExpertResidency(part.config, part.engine, part.residency, decisions, clock)
    before = residency.status().slot_experts

    def between() -> None:
        nonlocal told
        for _, step in part.steps[told:]:
            assert step.asleep is not None
            residency.on_step(step.expert_tokens, step.asleep, step.num_steps)
        told = len(part.steps)
        residency.turn(clock())

    assert serve(part, "traffic", between) == expected
    between()
    status = residency.status()
    assert status.resident_rows + status.asleep_rows == sum(s.expert_tokens.sum() for _, s in part.steps)
    assert status.slot_experts != before
    assert status.changes["evicted"] > 3
    assert min(status.late_fetches, status.prefetches_used) > 0
    assert {d.controller for d in decisions.after(0, 256)} == {"expert_residency"}
    assert status.host_bytes * SLOTS == status.device_bytes * EXPERTS


def test_text_is_the_same_whatever_wakes_and_sleeps(part, expected) -> None:
    """Random tables between any two launches, free slots among them; each launch sees its own tables and weights."""
    rng = np.random.default_rng(0)
    held = np.full((LAYERS, SLOTS), -1)

    def change(layer: int, slot: int) -> None:
        asleep = np.setdiff1d(np.arange(EXPERTS), held[layer])
        held[layer, slot] = rng.choice([-1, *asleep])
        if held[layer, slot] >= 0:
            part.engine.change_slots(WakeWeights(layer, int(held[layer, slot]), slot))
        table = np.full(EXPERTS, -1, np.int32)
        table[held[layer][held[layer] >= 0]] = np.flatnonzero(held[layer] >= 0)
        part.engine.change_slots(SetSlots(layer, table))

    def between() -> None:
        change(int(rng.integers(LAYERS)), int(rng.integers(SLOTS)))

    for layer in range(LAYERS):
        for slot in range(SLOTS):
            change(layer, slot)
    assert serve(part, "random", between) == expected
    asleep = np.sum([s.asleep for _, s in part.steps], axis=0)
    assert (asleep[:, AsleepColumn.LATE] > 0).all()
    assert asleep[0, AsleepColumn.STAGED_USED] == 0  # nobody fetches ahead for the first layer
    assert asleep[1, AsleepColumn.STAGED_USED] > asleep[1, AsleepColumn.STAGED_UNUSED]


@pytest.mark.parametrize(
    ("experts", "field"),
    [
        ({"resident_experts": 9}, "experts.resident_experts is 9; 0 to 8"),
        ({"resident_experts": 1}, r"experts.resident_experts is 1; 0, or 2 \(what one token"),
        ({"resident_experts": 2, "prefetch_experts": 8, "swaps_per_step": 1025}, "experts.swaps_per_step"),
        ({"prefetch_experts": 1}, "experts.prefetch_experts is 1; 0 only while"),
    ],
)
def test_what_does_not_fit_is_named(experts, field) -> None:
    with pytest.raises((ModelLoadError, ValueError), match=field):
        start(**experts)


@pytest.mark.parametrize("name", ["expert_parallel_size", "tensor_parallel_size"])
def test_several_devices_are_refused(name) -> None:
    with pytest.raises(ValueError, match=rf"resident_experts is 4 and parallel.{name} 2"):
        EngineDriver(experts={"resident_experts": 4}, parallel={name: 2}, ladder=SMALL)
