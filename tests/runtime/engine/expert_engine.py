"""What the mover and the balancing need of an engine, in memory: which expert's weights each slot holds, and what was set."""

from collections.abc import Mapping

import numpy as np

from runtime.config import EngineConfig, parse_config
from runtime.engine.step_forms import StepForms
from runtime.experts.placement import ExpertPlacement


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
