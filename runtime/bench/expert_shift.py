"""A sudden change of hot experts, step by step through the controller: moves count once they are applied. Imports no JAX.

A step is 4,096 tokens and 50 ms; copies share in each step, each device its own rows, as the engine does where steps do not
gather. Cadence is the engine's: a window of 0.5 s is learned from when it ends, then the controller is asked; a plan of up to
64 moves takes `plan_steps` turns between launches (in slices, so that no launch waits for it), and then `moves_per_step` moves
are made a turn. What differs: `expert_load` is of the window's last step instead of all of it, and costs of rows and moves are
the plan's defaults instead of measured ones. The skew case is the same with loads of which 80 % go to three experts.
"""

import time
from collections import deque
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
from runtime.bench.expert_replay import STEPS_PER_WINDOW, by_source, imbalance_of_steps, loads_of_steps
from runtime.bench.report import summary
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.load_predictor import LoadPredictor
from runtime.experts.placement import ExpertPlacement, Move, apply
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.rebalancing import Decision, RebalanceConfig, RebalanceObservation, RebalanceState
from runtime.experts.shares import device_loads, equal_shares, imbalance

STEP_S = 0.05  # of the virtual clock
ASKED_EVERY = 10  # steps: dynamic_adjust_window of 0.5 s
PLAN_STEPS = 12  # turns of a plan, as `benchmarks.balancing_turns --step-ms 50` has them
STEP_SHARE = 0.7  # of its target that a balanced step takes: expert_load is this times max / mean
CHANGED_PART = 0.1
JUDGED_STEP = 50
WATCHED_STEPS = (1, 2, 5, 10, 20, 30, 40, 50, 100, 200)


@dataclass(eq=False)
class RunningServer:
    """What the controller would find in an engine: its placement, and the moves under way.

    config.moves_per_step must be the whole plan's, as in the engine, whose mover holds back what is more than a step may take.
    decide_s: seconds of each decision, plan included.
    """

    placement: ExpertPlacement
    config: RebalanceConfig
    moves_per_step: int
    plan_steps: int
    predictor: LoadPredictor
    window: np.ndarray
    state: RebalanceState = field(default_factory=RebalanceState)
    decision: Decision | None = None  # while its plan is made
    waiting: deque[Move] = field(default_factory=deque)
    step: int = 0
    num_moves: int = 0
    num_applied: int = 0
    decide_s: list[float] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    seen: RebalanceObservation | None = None  # when a window ended last
    slice: int = 1  # layers of the plan a step

    @classmethod
    def start(
        cls,
        placement: ExpertPlacement,
        plan: PlanConfig,
        moves_per_step: int,
        plan_steps: int,
        seen: np.ndarray,
    ) -> "RunningServer":
        predictor = LoadPredictor(placement.num_layers, placement.num_experts)
        predictor.observe(seen)
        config = RebalanceConfig(moves_per_step=plan.max_moves, plan=plan)
        return cls(placement, config, moves_per_step, plan_steps, predictor, np.zeros(seen.shape))

    def loads(self, counts: np.ndarray) -> np.ndarray:
        """[L, D]: rows of the devices in a step with counts [L, E], as experts lie now."""
        parts = by_source(counts[None], self.placement.num_devices, self.rng)
        return loads_of_steps(self.placement, parts, self.config.plan.balance_weight)[0]

    def serve(self, counts: np.ndarray) -> None:
        """One step with counts [L, E], then what an engine does between it and the next."""
        self.window = self.window + counts
        self.step += 1
        is_window_over = self.step % ASKED_EVERY == 0
        if is_window_over:
            self.predictor.observe(self.window)
            self.window = np.zeros(counts.shape)
        if is_window_over or self.decision is not None:
            self._decide(counts, is_window_over)
        for _ in range(min(self.moves_per_step, len(self.waiting))):
            self.placement = apply(self.placement, self.waiting.popleft())
            self.num_moves += 1
            self.num_applied += 1

    def _decide(self, counts: np.ndarray, is_window_over: bool) -> None:
        """Ask the controller, or go on with the plan that it wants."""
        now_s = self.step * STEP_S
        decision = self.decision
        if is_window_over or self.seen is None:
            self.seen = self._observe(counts, now_s)
        obs = (
            self.seen
        )  # between two windows neither the forecast nor the placement changes while a plan is made
        start = time.perf_counter()
        if decision is None:
            decision = self.decision = Decision(self.state, obs, self.config, now_s)
            self.slice = -(-2 * decision.num_left // self.plan_steps)  # a layer takes two slices
            self.decide_s.append(0.0)
        elif decision.trouble(obs, now_s) is None:
            decision.advance(self.slice)
        if not decision.num_left or decision.trouble(obs, now_s) is not None:
            self.state, choice = decision.finish(obs, now_s)
            self.decision = None
            if choice.is_new_plan:
                self.waiting.clear()
                self.num_applied = 0
            self.waiting.extend(choice.moves)
        self.decide_s[-1] += time.perf_counter() - start

    def _observe(self, counts: np.ndarray, now_s: float) -> RebalanceObservation:
        return RebalanceObservation(
            time_s=now_s,
            placement=self.placement,
            expert_load=STEP_SHARE * float(1 + imbalance(self.loads(counts)).mean()),
            loads=self.predictor.predict().loads * counts.sum(axis=1, keepdims=True),
            num_applied=self.num_applied,
        )


def replay_shift(
    num_devices: int,
    slots_per_device: int,
    num_seeds: int,
    moves_per_step: int,
    balance_weight: float,
    num_steps: int = 50,
    plan_steps: int = PLAN_STEPS,
) -> dict[str, Any]:
    """Imbalance before the change, by steps after it, and with the placement of before; mean over seeds and layers.

    A window is served before the change. `after_steps` and `step_after_50_steps` are of single steps, the others of windows
    of four.
    """
    shape = SlotShape(SYNTHETIC_EXPERTS, num_devices, slots_per_device)
    plan = PlanConfig(balance_weight=balance_weight)
    watched = [n for n in WATCHED_STEPS if n <= num_steps]
    curves, stale, worst, moves, decide_s = [], [], [], [], []
    after_steps: dict[float, list[float]] = {0.0: [], balance_weight: []}
    for seed in range(num_seeds):
        rng = np.random.default_rng(1000 + seed)
        rates = zipf_rates(rng)
        seen = draw(rng, rates, SYNTHETIC_WINDOW_TOKENS)
        start = balance(seen, shape)
        server = RunningServer.start(start, plan, moves_per_step, plan_steps, seen)
        for _ in range(ASKED_EVERY):
            counts = draw(rng, rates, SYNTHETIC_STEP_TOKENS)
            server.serve(counts)
        curve = [float(imbalance(server.loads(counts)).mean())]
        before = server.num_moves
        changed = shifted(rng, rates, CHANGED_PART)
        for n in range(1, num_steps + 1):
            counts = draw(rng, changed, SYNTHETIC_STEP_TOKENS)
            if n in watched:
                curve.append(float(imbalance(server.loads(counts)).mean()))
            server.serve(counts)
            if n <= JUDGED_STEP:
                placement, num_moves = server.placement, server.num_moves - before
        # A window that nothing was made from.
        steps = np.array([draw(rng, changed, SYNTHETIC_STEP_TOKENS) for _ in range(STEPS_PER_WINDOW)])
        judged = by_source(steps, num_devices, rng)
        by_step = {weight: loads_of_steps(placement, judged, weight) for weight in after_steps}
        for weight, found in by_step.items():
            after_steps[weight].append(float(imbalance_of_steps(found).mean()))
        after = imbalance(by_step[balance_weight].sum(axis=0))
        curves.append([*curve, float(after.mean())])
        worst.append(float(after.max()))
        stale.append(float(imbalance(device_loads(start, steps.sum(axis=0))).mean()))
        moves.append(num_moves)
        decide_s += server.decide_s
    mean = np.mean(curves, axis=0)
    return {
        "devices": num_devices,
        "slots_per_device": slots_per_device,
        "seeds": num_seeds,
        "moves_per_step": moves_per_step,
        "balance_weight": balance_weight,
        "before": round(float(mean[0]), 4),
        "asked_every_steps": ASKED_EVERY,
        "plan_takes_steps": plan_steps,
        "max_moves_of_a_plan": plan.max_moves,
        "leaning_by": "own rows of each device",
        "after_steps": {str(n): round(float(value), 4) for n, value in zip(watched, mean[1:-1], strict=True)},
        "after_shift_50_steps": round(float(mean[-1]), 4),
        "step_after_50_steps": round(float(np.mean(after_steps[balance_weight])), 4),
        "step_after_50_steps_shared_equally": round(float(np.mean(after_steps[0.0])), 4),
        "worst_layer": round(float(np.mean(worst)), 4),
        "old_placement": round(float(np.mean(stale)), 4),
        "moves": round(float(np.mean(moves)), 1),
        "moves_per_layer": round(float(np.mean(moves)) / SYNTHETIC_LAYERS, 2),
        "decision_ms": summary([seconds * 1e3 for seconds in decide_s], digits=2),
    }


def skew_model(row_s: float, num_steps: int = 60) -> dict[str, Any]:
    """80 % of the tokens on 3 of 64 experts, 8 devices of 9 slots: rows of devices without and with balancing.

    Without: the start placement, one copy to a device where the slots allow, equal shares. With: the controller starts from
    the same placement, its moves and what happens before them counted. A plan of four layers is made in one step.
    """
    rng = np.random.default_rng(0)
    num_experts, num_layers = 64, 4
    rates = np.full((num_layers, num_experts), 0.2 / (num_experts - 3))
    for layer in rates:
        layer[rng.choice(num_experts, 3, replace=False)] = 0.8 / 3
    start = ExpertPlacement.uniform(num_layers, num_experts, 8, 9)
    plan = PlanConfig(balance_weight=0.5)
    draws = [rng.multinomial(SYNTHETIC_STEP_TOKENS * SYNTHETIC_TOP_K, rates) for _ in range(num_steps)]
    server = RunningServer.start(start, plan, 8, 1, draws[0])
    without = np.array([device_loads(start, counts, equal_shares(start)) for counts in draws])
    with_ = []
    for counts in draws:
        with_.append(server.loads(counts))
        server.serve(counts)
    return critical_path_gain(
        np.round(without, 6), np.array(with_) * (without.sum() / np.sum(with_)), row_s
    ) | {
        "steps": num_steps,
        "moves": server.num_moves,
        "source": "synthetic counts; rows of a real engine may be given to the same function",
    }
