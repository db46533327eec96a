"""When experts move, and why: a pure function from (state, observation, config, time) to the next moves and a reason.

Only a new plan takes more than a moment. `Decision` is the same function made some layers at a time, for who cannot wait.

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

from runtime.experts.load_predictor import distance
from runtime.experts.placement import ExpertPlacement, Move
from runtime.experts.rebalance_plan import PlanConfig, PlanImprovement, RebalancePlan


class Reason(StrEnum):
    """Why experts move or do not; docs/experts.md explains each."""

    ONE_DEVICE = "one_device"
    PAUSED = "paused"
    STALE = "stale"  # for callers that observe at another time than they ask; the engine does both at once
    MISSING_DATA = "missing_data"
    BELOW_THRESHOLD = "below_threshold"
    DWELL = "dwell"
    NOT_WORTH = "not_worth"
    STARTED = "started"
    MOVING = "moving"
    WAITING = "waiting"
    PLANNING = "planning"
    FINISHED = "finished"
    OVERDUE = "overdue"
    CHANGED_UNDER_PLAN = "changed_under_plan"


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """expert_load_threshold: in (0, 1]. release: part of it below which an active rebalancing ends.
    moves_per_step: most moves given out at a time, the engine's limit. dwell_s: least time between two plans.
    stale_after_s: age of an observation that is too old. heartbeat_s: longest time without a move applied.
    deadline_s: longest time for a whole plan, and for making one. jump: distance between forecasts, in [0, 1], above which
    a plan that is being made is for other traffic.
    """

    expert_load_threshold: float = 0.75
    release: float = 0.9
    moves_per_step: int = 8
    dwell_s: float = 0.0
    stale_after_s: float = 2.0
    heartbeat_s: float = 5.0
    deadline_s: float = 30.0
    jump: float = 0.25
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
            ("jump", 0.0, 1.0),
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
    decision = Decision(state, obs, config, now_s)
    while decision.num_left:
        decision.advance(obs.placement.num_layers)
    return decision.finish(obs, now_s)


class Decision:
    """`decide_rebalancing`, made some layers at a time.

    num_left: layers that a new plan still has to look at; 0 where none is made, so that `finish` may be called at once.
    """

    def __init__(
        self, state: RebalanceState, obs: RebalanceObservation, config: RebalanceConfig, now_s: float
    ) -> None:
        """Raises ValueError for loads of the wrong shape or that are no numbers, where a plan is to be made."""
        self._before, self._obs, self._config, self._begun_s = state, obs, config, now_s
        self._state, self._moves, self._reason = _decide(state, obs, config, now_s)
        self._making: PlanImprovement | None = None
        if self._reason is Reason.PLANNING:
            assert obs.loads is not None
            self._making = PlanImprovement(obs.placement, obs.loads, config.plan, obs.pinned_layers)

    @property
    def num_left(self) -> int:
        return self._making.num_left if self._making is not None else 0

    def advance(self, num_layers: int) -> None:
        """Half of the work for the next so many layers."""
        if self._making is not None:
            self._making.advance(num_layers)

    def trouble(self, now: RebalanceObservation, now_s: float) -> Reason | None:
        """Why the plan that is being made is of no use any more. Whoever is told ends it by `finish`."""
        if self._making is None:
            return None
        if now.is_paused:
            return Reason.PAUSED
        if now_s - self._begun_s > self._config.deadline_s:
            return Reason.OVERDUE
        is_same = now.placement is self._obs.placement and now.pinned_layers == self._obs.pinned_layers
        return None if is_same and not self._has_jumped(now.loads) else Reason.CHANGED_UNDER_PLAN

    def finish(self, now: RebalanceObservation, now_s: float) -> tuple[RebalanceState, RebalanceChoice]:
        """The next state and what to do; a plan that is in trouble by now is dropped. ValueError where layers are left
        without trouble."""
        state, moves, reason = self._state, self._moves, self._reason
        if (trouble := self.trouble(now, now_s)) is not None:
            state, reason = self._without_plan(trouble, now_s), trouble
        elif self._making is not None:
            state, moves, reason = _begin(state, self._making.finish(), self._config, now_s)
        inputs = _inputs(state, self._obs, self._config, now_s)
        is_new_plan = state.plan is not self._before.plan
        return state, RebalanceChoice(moves, reason, state.alarm, is_new_plan, inputs)

    def _has_jumped(self, loads: np.ndarray | None) -> bool:
        """Whether the forecast of now is of other traffic than the plan's."""
        if loads is self._obs.loads:
            return False
        return loads is None or distance(_by_layer(loads), _by_layer(self._obs.loads)) > self._config.jump

    def _without_plan(self, trouble: Reason, now_s: float) -> RebalanceState:
        state = replace(self._state, ended_s=now_s)
        if trouble is Reason.PAUSED:
            return replace(state, is_active=False)
        if trouble is not Reason.OVERDUE:
            return state
        alarm = (
            f"rebalance plan overdue: not made {now_s - self._begun_s:.1f} s after it was begun "
            f"(deadline {self._config.deadline_s} s)"
        )
        return replace(state, alarm=alarm)


def _by_layer(loads: np.ndarray | None) -> np.ndarray:
    """Shares of each layer's load; a layer without load has none."""
    assert loads is not None  # no plan is begun without
    return loads / np.maximum(loads.sum(axis=1, keepdims=True), 1e-300)


def _inputs(
    state: RebalanceState, obs: RebalanceObservation, config: RebalanceConfig, now_s: float
) -> dict[str, float | int | str | None]:
    plan = state.plan
    return {
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


def _decide(
    state: RebalanceState, obs: RebalanceObservation, config: RebalanceConfig, now_s: float
) -> tuple[RebalanceState, tuple[Move, ...], Reason]:
    """PLANNING where a new plan is wanted, else what is done without one."""
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
    return state, (), Reason.PLANNING


def _begin(
    state: RebalanceState, plan: RebalancePlan, config: RebalanceConfig, now_s: float
) -> tuple[RebalanceState, tuple[Move, ...], Reason]:
    """The plan's first moves, if they are worth it."""
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
