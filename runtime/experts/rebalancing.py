"""When experts move, and why: a pure function from (state, observation, config, time) to the next moves and a reason.

Rebalancing starts when the busiest device's load is above `expert_load_threshold` and goes on until it is below the
threshold times `release`. One plan is carried out at a time, a few moves a step; a plan is short, so the next one is made
from fresh loads. Every plan has a deadline, and a heartbeat: if the engine has applied nothing for too long, or the plan is
not done in time, the plan is dropped, which is safe after any move, and an alarm stands until a plan has been carried out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from runtime.experts.balancer import checked_loads
from runtime.experts.placement import ExpertPlacement, Move
from runtime.experts.rebalance_plan import PlanConfig, RebalancePlan, plan_improvement


class Reason(StrEnum):
    """Why experts move or do not; docs/experts.md explains each."""

    ONE_DEVICE = "one_device"
    PAUSED = "paused"
    STALE = "stale"
    MISSING_DATA = "missing_data"
    BELOW_THRESHOLD = "below_threshold"
    DWELL = "dwell"
    NOT_WORTH = "not_worth"
    STARTED = "started"
    MOVING = "moving"
    WAITING = "waiting"
    FINISHED = "finished"
    OVERDUE = "overdue"
    CHANGED_UNDER_PLAN = "changed_under_plan"


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """expert_load_threshold: in (0, 1]. release: part of it below which an active rebalancing ends.
    moves_per_step: most moves given out at a time, the engine's limit. dwell_s: least time between two plans.
    stale_after_s: age of an observation that is too old. heartbeat_s: longest time without a move applied.
    deadline_s: longest time for a whole plan.
    """

    expert_load_threshold: float = 0.75
    release: float = 0.9
    moves_per_step: int = 8
    dwell_s: float = 0.0
    stale_after_s: float = 2.0
    heartbeat_s: float = 5.0
    deadline_s: float = 30.0
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("expert_load_threshold", 1e-6, 1.0),
            ("release", 0.0, 1.0),
            ("moves_per_step", 1, 10**6),
            ("dwell_s", 0.0, 86400.0),
            ("stale_after_s", 1e-3, 86400.0),
            ("heartbeat_s", 1e-3, 86400.0),
            ("deadline_s", 1e-3, 86400.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} must be in [{low}, {high}], not {value}")


@dataclass(frozen=True, eq=False)
class RebalanceObservation:
    """What the engine knows at `time_s` (monotonic seconds). None: not known now.

    placement: as it serves now, all applied moves in it.
    expert_load: busiest device over the mean, times the step's share of its target (`Observation.expert_load`).
    loads: float [L, E], expected rows of each expert in a step, from `LoadPredictor`.
    num_applied: moves applied since the last choice with is_new_plan. is_paused: an operator says stop.
    pinned_layers: layers whose placement stays as it is.
    """

    time_s: float
    placement: ExpertPlacement
    expert_load: float | None
    loads: np.ndarray | None
    num_applied: int = 0
    is_paused: bool = False
    pinned_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class RebalanceState:
    """What one decision leaves for the next. num_given, num_applied: moves of `plan` given out, and seen applied."""

    is_active: bool = False
    plan: RebalancePlan | None = None
    num_given: int = 0
    num_applied: int = 0
    started_s: float = -math.inf
    progress_s: float = -math.inf
    ended_s: float = -math.inf
    alarm: str | None = None


@dataclass(frozen=True, eq=False)
class RebalanceChoice:
    """moves: to apply in the next step, in this order. is_new_plan: a plan began or ended; what the engine has not applied
    of an older one it drops, and it counts applied moves anew. alarm: a sentence for the operator while one stands."""

    moves: tuple[Move, ...]
    reason: Reason
    alarm: str | None
    is_new_plan: bool
    inputs: Mapping[str, float | int | str | None]


def decide_rebalancing(
    state: RebalanceState, obs: RebalanceObservation, config: RebalanceConfig, now_s: float
) -> tuple[RebalanceState, RebalanceChoice]:
    """The next state and what to do now. ValueError for loads of the wrong shape or that are no numbers."""
    if obs.loads is not None:
        checked_loads(obs.loads, obs.placement.num_experts, obs.placement.num_layers)
    before = state
    state, moves, reason = _decide(state, obs, config, now_s)
    plan = state.plan
    inputs = {
        "expert_load": obs.expert_load,
        "threshold": config.expert_load_threshold,
        "release": config.release * config.expert_load_threshold,
        "age_s": now_s - obs.time_s,
        "num_moves": len(plan.moves) if plan else 0,
        "num_applied": state.num_applied,
        "plan_age_s": now_s - state.started_s if plan else None,
        "imbalance_before": float(plan.imbalance_before.mean()) if plan else None,
        "imbalance_after": float(plan.imbalance_after.mean()) if plan else None,
        "saving_s": plan.saving_s if plan else None,
        "cost_s": plan.cost_s if plan else None,
    }
    return state, RebalanceChoice(moves, reason, state.alarm, plan is not before.plan, inputs)


def _decide(
    state: RebalanceState, obs: RebalanceObservation, config: RebalanceConfig, now_s: float
) -> tuple[RebalanceState, tuple[Move, ...], Reason]:
    if obs.placement.num_devices == 1:
        return RebalanceState(), (), Reason.ONE_DEVICE
    if obs.is_paused:
        return replace(without_plan(state, now_s), is_active=False), (), Reason.PAUSED
    is_stale = not now_s - obs.time_s <= config.stale_after_s
    if state.plan is not None:
        return _carry_on(state, state.plan, obs, config, now_s, is_stale)
    if is_stale:
        return state, (), Reason.STALE
    if obs.expert_load is None or not math.isfinite(obs.expert_load) or obs.loads is None:
        return state, (), Reason.MISSING_DATA
    threshold = config.expert_load_threshold * (config.release if state.is_active else 1)
    if obs.expert_load <= threshold:
        return replace(state, is_active=False), (), Reason.BELOW_THRESHOLD
    state = replace(state, is_active=True)
    if now_s - state.ended_s < config.dwell_s:
        return state, (), Reason.DWELL
    plan = plan_improvement(obs.placement, obs.loads, config.plan, obs.pinned_layers)
    if not plan.moves or plan.saving_s <= plan.cost_s:
        return replace(state, ended_s=now_s), (), Reason.NOT_WORTH
    given = plan.moves[: config.moves_per_step]
    state = replace(state, plan=plan, num_given=len(given), num_applied=0)
    return replace(state, started_s=now_s, progress_s=now_s), given, Reason.STARTED


def _carry_on(
    state: RebalanceState,
    plan: RebalancePlan,
    obs: RebalanceObservation,
    config: RebalanceConfig,
    now_s: float,
    is_stale: bool,
) -> tuple[RebalanceState, tuple[Move, ...], Reason]:
    """The plan's next moves once those given out are applied."""
    applied = state.num_applied if is_stale else min(max(obs.num_applied, state.num_applied), state.num_given)
    if applied > state.num_applied:
        state = replace(state, num_applied=applied, progress_s=now_s)
    if applied == len(plan.moves):
        return replace(without_plan(state, now_s), alarm=None), (), Reason.FINISHED
    late_s = now_s - state.started_s
    silent_s = now_s - state.progress_s
    if late_s > config.deadline_s or silent_s > config.heartbeat_s:
        alarm = (
            f"rebalance plan overdue: {applied} of {len(plan.moves)} moves applied {late_s:.1f} s after its start "
            f"(deadline {config.deadline_s} s), none for {silent_s:.1f} s (heartbeat {config.heartbeat_s} s)"
        )
        return replace(without_plan(state, now_s), alarm=alarm), (), Reason.OVERDUE
    if is_stale:
        return state, (), Reason.STALE
    if any(move.layer in obs.pinned_layers for move in plan.moves[applied:]):
        return without_plan(state, now_s), (), Reason.CHANGED_UNDER_PLAN
    if applied < state.num_given:
        return state, (), Reason.WAITING
    given = plan.moves[applied : applied + config.moves_per_step]
    if not _can_apply(obs.placement, given[0]):
        return without_plan(state, now_s), (), Reason.CHANGED_UNDER_PLAN
    return replace(state, num_given=applied + len(given)), given, Reason.MOVING


def without_plan(state: RebalanceState, now_s: float) -> RebalanceState:
    """The plan ended, for whoever has dropped its moves."""
    if state.plan is None:
        return state
    return replace(state, plan=None, num_given=0, num_applied=0, ended_s=now_s)


def _can_apply(placement: ExpertPlacement, move: Move) -> bool:
    """Whether the placement is what the plan took it to be, as far as its next move goes."""
    row = placement.slot_experts[move.layer]
    is_there = row[move.from_slot] == move.expert
    return bool(is_there and (move.is_exchange or placement.copies[move.layer, row[move.to_slot]] > 1))
