"""What the mover and the balancing need of an engine, in memory: which expert's weights each slot holds, and what was set."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np

from runtime.adaptive.decision import DecisionLog
from runtime.config import EngineConfig, parse_config
from runtime.engine.balancing import ExpertBalancing
from runtime.engine.commands import MoveExperts
from runtime.engine.expert_mover import ExpertMover
from runtime.engine.expert_status import ExpertOrder
from runtime.engine.step_forms import StepForms
from runtime.engine.traffic_mix import Mixes
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads
from tests.runtime.experts.expert_cases import zipf

LAYERS, EXPERTS = 3, 16
TOKENS = np.round(zipf(LAYERS, EXPERTS)).astype(np.int64)


class SlotsInMemory:
    """weights: int [L, S], the expert whose weights are in each slot. tables: the last table of copies of each layer."""

    forms = StepForms(0.0)  # none

    def __init__(self, placement: ExpertPlacement) -> None:
        self.weights = placement.slot_experts.copy()
        self.tables: dict[int, np.ndarray] = {}
        self.balance_weights: list[float] = []
        self.num_measured = 0
        self.lean = np.zeros((placement.num_layers, placement.num_experts), np.float32)

    def measure_move(self) -> float:
        self.num_measured += 1
        return 1e-6

    def move_experts(self, layer: int, source: Mapping[int, int], table: np.ndarray) -> None:
        before = self.weights[layer].copy()
        for to_slot, from_slot in source.items():
            self.weights[layer][to_slot] = before[from_slot]
        self.tables[layer] = table

    def lean_router(self, layer: int, bias: np.ndarray) -> None:
        self.lean[layer] = bias

    def set_balance_weight(self, weight: float) -> None:
        self.balance_weights.append(weight)


def expert_config(**batch_processing: float) -> EngineConfig:
    return parse_config(
        {
            "parallel": {"expert_parallel_size": 4, "redundant_experts": 4, "moves_per_step": 3},
            "batch_processing": {"dynamic_adjust_window": "1s"} | batch_processing,
        }
    )


class Served:
    """A balancing with a clock of its own. One step of TOKENS a `step`."""

    def __init__(self, slice_s: float = 0.0, **batch_processing: float) -> None:
        """slice_s: what any slice takes on the timer; at 0 a turn does all there is."""
        self.now_s, self.timer_s, self.slice_s = 0.0, 0.0, slice_s
        self.start = ExpertPlacement.uniform(LAYERS, EXPERTS, 4, 5)
        self.slots = SlotsInMemory(self.start)
        self.mover = ExpertMover(self.slots, self.start)
        self.decisions = DecisionLog(64)
        self.num_forgotten = 0
        self.hour: Callable[[], float] = lambda: 0.0
        self.mixes: Mixes = (None, None)
        self.balancing = ExpertBalancing(
            expert_config(**batch_processing),
            self.mover,
            self.decisions,
            lambda: self.now_s,
            self._forget,
            self._read_hour,
            lambda: self.mixes,
            self._read_timer,
        )

    def _forget(self) -> None:
        self.num_forgotten += 1

    def _read_hour(self) -> float:
        return self.hour()

    def _read_timer(self) -> float:
        self.timer_s += self.slice_s
        return self.timer_s

    def step(self, step_share: float | None = 0.1, tokens: np.ndarray = TOKENS) -> None:
        rows = np.round(device_loads(self.mover.placement, tokens)).astype(np.int64)
        self.balancing.on_step(tokens, rows, 1, 0.1)
        self.now_s += 1.0
        self.balancing.turn(self.now_s, step_share)
        np.testing.assert_array_equal(self.slots.weights, self.mover.placement.slot_experts)

    def order(self, **wishes) -> Future:
        done: Future = Future()
        MoveExperts(ExpertOrder(**wishes), self.balancing.carry_out, done).run()
        return done
