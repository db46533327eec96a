"""A sudden change of hot experts, step by step through the controller: moves count once they are applied. Imports no JAX.

A step is 4,096 tokens. The engine is taken to apply, during a step, the moves that the controller gave out before it, at
most `moves_per_step`; the controller sees them as applied before the next step. The predictor gets a window every four
steps. The skew case is the same with loads of which 80 % go to three experts.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.bench.expert_bound import critical_path_gain
from runtime.bench.expert_loads import (
    SYNTHETIC_EXPERTS,
    SYNTHETIC_LAYERS,
    SYNTHETIC_STEP_TOKENS,
    SYNTHETIC_TOP_K,
    SYNTHETIC_WINDOW_TOKENS,
    draw,
    shifted,
    zipf_rates,
)
from runtime.bench.expert_replay import STEP_GAIN, STEPS_PER_WINDOW
from runtime.bench.report import summary
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.load_predictor import LoadPredictor
from runtime.experts.placement import ExpertPlacement, apply
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.rebalancing import (
    RebalanceChoice,
    RebalanceConfig,
    RebalanceObservation,
    RebalanceState,
    decide_rebalancing,
)
from runtime.experts.shares import device_loads, equal_shares, imbalance, slot_shares

STEP_S = 0.05  # of the virtual clock
STEP_SHARE = 0.7  # of its target that a balanced step takes: expert_load is this times max / mean
CHANGED_PART = 0.1


@dataclass(eq=False)
class RunningServer:
    """What the controller would find in an engine: its placement, the moves under way and recent counts."""

    placement: ExpertPlacement
    config: RebalanceConfig
    predictor: LoadPredictor
    recent: np.ndarray
    state: RebalanceState
    window: np.ndarray
    step: int = 0
    num_moves: int = 0
    num_applied: int = 0
    decide_s: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, placement: ExpertPlacement, config: RebalanceConfig, seen: np.ndarray) -> "RunningServer":
        predictor = LoadPredictor(placement.num_layers, placement.num_experts)
        predictor.observe(seen)
        return cls(placement, config, predictor, seen.astype(float), RebalanceState(), np.zeros(seen.shape))

    def serve(self, counts: np.ndarray) -> np.ndarray:
        """One step with counts [L, E]: the loads of the devices [L, D]; then what the controller gives out is applied."""
        weight = self.config.plan.balance_weight
        by_device = device_loads(self.placement, counts, slot_shares(self.placement, self.recent, weight))
        self.recent = self.recent + STEP_GAIN * (counts - self.recent)
        self.window = self.window + counts
        self.step += 1
        if self.step % STEPS_PER_WINDOW == 0:
            self.predictor.observe(self.window)
            self.window = np.zeros(counts.shape)
        start = time.perf_counter()
        choice = self._decide(by_device, counts)
        self.decide_s.append(time.perf_counter() - start)
        self.num_applied = 0 if choice.is_new_plan else self.num_applied
        for move in choice.moves:
            self.placement = apply(self.placement, move)
        self.num_moves += len(choice.moves)
        self.num_applied += len(choice.moves)
        return by_device

    def _decide(self, by_device: np.ndarray, counts: np.ndarray) -> RebalanceChoice:
        now_s = self.step * STEP_S
        rows = counts.sum(axis=1, keepdims=True)
        obs = RebalanceObservation(
            time_s=now_s,
            placement=self.placement,
            expert_load=STEP_SHARE * float(1 + imbalance(by_device).mean()),
            loads=self.predictor.predict().loads * rows,
            num_applied=self.num_applied,
        )
        self.state, choice = decide_rebalancing(self.state, obs, self.config, now_s)
        return choice


def replay_shift(
    num_devices: int,
    slots_per_device: int,
    num_seeds: int,
    moves_per_step: int,
    balance_weight: float,
    num_steps: int = 50,
) -> dict[str, Any]:
    """Imbalance before the change, by steps after it, and with the placement of before; mean over seeds and layers."""
    shape = SlotShape(SYNTHETIC_EXPERTS, num_devices, slots_per_device)
    plan = PlanConfig(balance_weight=balance_weight, max_moves=8 * moves_per_step)
    config = RebalanceConfig(moves_per_step=moves_per_step, plan=plan)
    curves, stale, worst, moves, decide_s = [], [], [], [], []
    for seed in range(num_seeds):
        rng = np.random.default_rng(1000 + seed)
        rates = zipf_rates(rng)
        seen = draw(rng, rates, SYNTHETIC_WINDOW_TOKENS)
        start = balance(seen, shape)
        server = RunningServer.start(start, config, seen / STEPS_PER_WINDOW)
        curve = [float(imbalance(server.serve(draw(rng, rates, SYNTHETIC_STEP_TOKENS))).mean())]
        before = server.num_moves
        changed = shifted(rng, rates, CHANGED_PART)
        for _ in range(num_steps):
            curve.append(float(imbalance(server.serve(draw(rng, changed, SYNTHETIC_STEP_TOKENS))).mean()))
        judged = draw(rng, changed, SYNTHETIC_WINDOW_TOKENS)  # a window that nothing was made from
        shares = slot_shares(server.placement, server.recent, balance_weight)
        after = imbalance(device_loads(server.placement, judged, shares))
        curves.append([*curve, float(after.mean())])
        worst.append(float(after.max()))
        stale.append(float(imbalance(device_loads(start, judged)).mean()))
        moves.append(server.num_moves - before)
        decide_s += server.decide_s
    mean = np.mean(curves, axis=0)
    return {
        "devices": num_devices,
        "slots_per_device": slots_per_device,
        "seeds": num_seeds,
        "moves_per_step": moves_per_step,
        "balance_weight": balance_weight,
        "before": round(float(mean[0]), 4),
        "after_steps": {
            str(n): round(float(mean[n]), 4) for n in (1, 2, 5, 10, 20, 30, 40, 50) if n <= num_steps
        },
        "after_shift_50_steps": round(float(mean[-1]), 4),
        "worst_layer": round(float(np.mean(worst)), 4),
        "old_placement": round(float(np.mean(stale)), 4),
        "moves": round(float(np.mean(moves)), 1),
        "moves_per_layer": round(float(np.mean(moves)) / SYNTHETIC_LAYERS, 2),
        "decision_ms": summary([seconds * 1e3 for seconds in decide_s], digits=2),
    }


def skew_model(row_s: float, num_steps: int = 60) -> dict[str, Any]:
    """80 % of the tokens on 3 of 64 experts, 8 devices of 9 slots: rows of devices without and with balancing.

    Without: the start placement, one copy to a device where the slots allow, equal shares. With: the controller starts from
    the same placement, its moves and what happens before them counted.
    """
    rng = np.random.default_rng(0)
    num_experts, num_layers = 64, 4
    rates = np.full((num_layers, num_experts), 0.2 / (num_experts - 3))
    for layer in rates:
        layer[rng.choice(num_experts, 3, replace=False)] = 0.8 / 3
    start = ExpertPlacement.uniform(num_layers, num_experts, 8, 9)
    config = RebalanceConfig(plan=PlanConfig(balance_weight=0.5, max_moves=32))
    draws = [rng.multinomial(SYNTHETIC_STEP_TOKENS * SYNTHETIC_TOP_K, rates) for _ in range(num_steps)]
    server = RunningServer.start(start, config, draws[0])
    without = np.array([device_loads(start, counts, equal_shares(start)) for counts in draws])
    with_ = np.array([server.serve(counts) for counts in draws])
    return critical_path_gain(np.round(without, 6), with_ * (without.sum() / with_.sum()), row_s) | {
        "steps": num_steps,
        "moves": server.num_moves,
        "source": "synthetic counts; rows of a real engine may be given to the same function",
    }
