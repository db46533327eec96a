"""A slot never holds another expert than its table says, and what is told adds up. The device is a small model of one."""

from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.adaptive.decision import DecisionLog
from runtime.config import parse_config
from runtime.engine.device_commands import SetSlots, WakeWeights
from runtime.engine.expert_residency import ExpertResidency
from runtime.engine.residency_shape import ResidencyShape
from runtime.experts.residency import AsleepColumn, ResidencyReason

LAYERS, EXPERTS, SLOTS = 3, 6, 2
DENSE = 1  # the layer in the middle has no experts
SHAPE = ResidencyShape((True, False, True), EXPERTS, SLOTS, expert_bytes=100)
MOVED = (ResidencyReason.WOKE, ResidencyReason.EVICTED, ResidencyReason.SLEPT)


@dataclass
class Device:
    """Whose weights lie in each slot, and the tables that steps read; as an engine has them at its start."""

    weights: np.ndarray = field(default_factory=lambda: np.tile(np.arange(SLOTS), (LAYERS, 1)))
    tables: list[np.ndarray] = field(default_factory=lambda: [np.array([0, 1, -1, -1, -1, -1])] * LAYERS)
    wakes: list[WakeWeights] = field(default_factory=list)
    given: list[tuple[np.ndarray, list[int]]] = field(default_factory=list)  # tables, and what they said then

    def change_slots(self, command: WakeWeights | SetSlots) -> None:
        assert command.layer != DENSE
        if isinstance(command, WakeWeights):
            self.weights[command.layer, command.slot] = command.expert
            self.wakes.append(command)
        else:
            self.tables[command.layer] = command.table
            self.given.append((command.table, command.table.tolist()))

    def launch(self, wanted: np.ndarray) -> np.ndarray:
        """What the step counts of experts that were asleep. Every resident one must find its own weights."""
        asleep = np.zeros((LAYERS, len(AsleepColumn)), np.int64)
        for layer in (0, 2):
            table = self.tables[layer]
            for expert in np.flatnonzero(table >= 0):
                assert self.weights[layer, table[expert]] == expert, "a step would compute with other weights"
            missed = wanted[layer] * (table < 0)
            asleep[layer, AsleepColumn.ROWS] = missed.sum()
            asleep[layer, AsleepColumn.LATE] = (missed > 0).sum()
        return asleep


class Served:
    """A device with its residency; a launch comes every 0.1 s."""

    def __init__(self, **experts) -> None:
        self.config = parse_config({"experts": {"resident_experts": SLOTS, "wake_margin": 0.0} | experts})
        self.device, self.decisions, self._ticks = Device(), DecisionLog(4096), count(1)
        self.now_s = 0.0
        self.residency = ExpertResidency(
            self.config,
            self.device,
            SHAPE,
            self.decisions,
            lambda: self.now_s,  # pyright: ignore
        )

    def step(self, wanted: np.ndarray, num_steps: int = 1) -> None:
        self.residency.turn(self.now_s)
        asleep = self.device.launch(wanted)
        self.now_s = 0.1 * next(self._ticks)
        self.residency.on_step(wanted, asleep, num_steps)

    def told(self) -> dict[str, int]:
        """By reason, from the decision log."""
        found = dict.fromkeys(map(str, ResidencyReason), 0)
        for decision in self.decisions.after(0, 4096):
            found[decision.reason] += int(decision.inputs["times"] or 0)
        return found


def rows(*experts: int, num: int = 1) -> np.ndarray:
    """Wanted in each layer that has experts."""
    found = np.zeros((LAYERS, EXPERTS), np.int64)
    found[0, list(experts)] = found[2, list(experts)] = num
    return found


histories = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=2 * EXPERTS, max_size=2 * EXPERTS), st.integers(1, 8)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(history=histories, swaps=st.integers(0, 3), sleep_after=st.sampled_from(["300ms", "1h"]))
def test_steps_find_the_weights_that_their_tables_promise_and_counts_add_up(
    history, swaps, sleep_after
) -> None:
    served = Served(swaps_per_step=swaps, sleep_after=sleep_after)
    total = 0
    for counts, num_steps in history:
        wanted = np.zeros((LAYERS, EXPERTS), np.int64)
        wanted[0], wanted[2] = np.reshape(counts, (2, EXPERTS))
        num_wakes = len(served.device.wakes)
        served.step(wanted, num_steps)
        assert len(served.device.wakes) - num_wakes <= swaps
        total += int(wanted.sum())
    status, device = served.residency.status(), served.device
    assert all(table.tolist() == said for table, said in device.given), "a launch's table changed under it"
    for layer, slots in zip(status.layers, status.slot_experts, strict=True):
        held = {expert: slot for slot, expert in enumerate(slots) if expert >= 0}
        assert held == {e: s for e, s in enumerate(device.tables[layer].tolist()) if s >= 0}
    assert status.layers == (0, 2)
    assert status.num_steps == sum(num_steps for _, num_steps in history)
    assert (sum(status.layer_rows), sum(status.layer_asleep_rows)) == (total, status.asleep_rows)
    assert status.resident_rows + status.asleep_rows == total
    assert status.changes["woke"] + status.changes["evicted"] == len(device.wakes)
    start, freed = 2 * SLOTS, status.changes["slept"]
    assert status.num_resident == start + status.changes["woke"] - freed
    for rate, all_rows, missed in zip(
        status.hit_rates, status.layer_rows, status.layer_asleep_rows, strict=True
    ):
        assert rate == (pytest.approx(1 - missed / all_rows) if all_rows else None)


def test_weights_are_there_before_the_table_that_names_them() -> None:
    served, order = Served(swaps_per_step=1), []
    change = served.device.change_slots
    served.device.change_slots = lambda command: (order.append(type(command)), change(command))[1]
    for _ in range(4):
        served.step(rows(4, 5))
    assert order[:2] == [WakeWeights, SetSlots]


def test_what_is_told_is_told_once_a_window_and_nothing_is_lost_between() -> None:
    served = Served(sleep_after="2s")
    window_s = served.config.batch_processing.dynamic_adjust_window
    for number in range(100):
        is_quiet = number % 50 < 30  # long enough for the other slot to be freed; then somebody wakes into it
        served.step(rows(5) if is_quiet else rows(2 + number % 2, 5))
        status = served.residency.status()
        untold = {reason: status.changes[reason] - times for reason, times in served.told().items()}
        assert min(untold.values()) >= 0
    served.now_s += window_s
    served.residency.turn(served.now_s)
    assert served.told() == dict(served.residency.status().changes)
    assert all(served.residency.status().changes[reason] for reason in MOVED), "the test needs all of them"
    times = sorted({d.time_s for d in served.decisions.after(0, 4096)})
    assert min(np.diff(times)) >= window_s - 1e-9


def test_a_live_change_holds_from_the_next_turn() -> None:
    served = Served(swaps_per_step=0)
    for _ in range(5):
        served.step(rows(4, 5))
    assert served.device.wakes == []
    served.residency.config = parse_config({"experts": {"resident_experts": SLOTS, "swaps_per_step": 2}})
    served.step(rows(4, 5))
    assert {(wake.layer, wake.expert) for wake in served.device.wakes} <= {(0, 4), (0, 5), (2, 4), (2, 5)}
    assert len(served.device.wakes) == 2


def test_bytes_are_those_of_layers_that_have_experts() -> None:
    status = Served().residency.status()
    assert (status.device_bytes, status.host_bytes) == (2 * SLOTS * 100, 2 * EXPERTS * 100)
    assert (status.num_resident, status.hit_rates) == (4, (None, None))
