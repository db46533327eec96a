"""ExpertBalancing: loads in, moves out. Owned by the engine's thread; the decisions are `runtime.experts.rebalancing`'s.

Each window the tokens of the steps go to the predictor, and the controller decides from its forecast. Both are done in slices,
so that no turn between two launches takes long. Moves wait in the ExpertMover, which applies `parallel.moves_per_step` of them
between two launches. While an operator's order is planned or carried out the controller is not asked; while it is planned
nothing moves, so that the plan is for what serves.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from runtime.adaptive.decision import DecisionLog
from runtime.config import EngineConfig
from runtime.engine.expert_forecast import ExpertForecast, hour_of_day
from runtime.engine.expert_mover import ExpertMover, MisfitError
from runtime.engine.expert_planning import ExpertPlanning
from runtime.engine.expert_status import ExpertAnswer, ExpertOrder, ExpertStatus
from runtime.engine.pace import SLICE_S, Pace
from runtime.engine.traffic_mix import Mixes
from runtime.errors import InvalidRequest, Unavailable
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanConfig, RebalancePlan
from runtime.experts.rebalancing import (
    Decision,
    Reason,
    RebalanceConfig,
    RebalanceObservation,
    RebalanceState,
    without_plan,
)
from runtime.experts.shares import lean_between_experts

log = logging.getLogger(__name__)

PLANNED_WITH = ("expert_balance_weight", "expert_load_threshold")  # settings that a plan is made with
LEAN_STEP = 0.1  # of the way to the bias that a window asks for


class ExpertBalancing:
    """One for an engine whose experts lie on several devices."""

    def __init__(
        self,
        config: EngineConfig,
        mover: ExpertMover,
        decisions: DecisionLog,
        clock: Callable[[], float] = time.monotonic,
        forget_prefixes: Callable[[], None] = lambda: None,
        hour: Callable[[], float] = hour_of_day,
        end_mix: Callable[[], Mixes] = lambda: (None, None),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """forget_prefixes: clears the prefix cache, where KV of other experts than the router's choice may lie.

        end_mix: called once for each window with tokens; tokens by traffic key of this one and of the next.
        timer: what slices are measured by; one that stands still makes a turn do all there is.
        """
        self.config = config
        self._mover, self._decisions, self._clock = mover, decisions, clock
        self._forget_prefixes = forget_prefixes
        self._forecast = ExpertForecast(mover.placement, hour, end_mix)
        self._planning = ExpertPlanning()
        self._timer = timer
        self._learning: Iterator[bool] | None = None  # from the last window, while it goes on
        self._decision: Decision | None = None  # while its plan is made
        self._planning_pace, self._putting_pace = Pace(timer), Pace(timer)
        self._is_others_turn = False  # a window was learned from while a plan is being made
        self._is_due = False  # the controller is to be asked
        self._state = RebalanceState()
        self._reason = Reason.MISSING_DATA.value
        self._is_paused, self._pinned = False, frozenset[int]()
        self._is_ordered = False  # an operator's moves wait
        self._applied_before = 0  # moves applied when the plan began
        self._looked_s = clock()
        self._launch_s = 0.0  # the last one's seconds
        self._lean: np.ndarray | None = (
            None  # bias of the choice of experts, [L, E]; None while there is none
        )
        self._shown: tuple[ExpertPlacement | None, tuple[tuple[int, ...], ...]] = (None, ())

    def configure(self, config: EngineConfig) -> None:
        """Take over live fields: `expert_balance_weight` holds from the next launch on, and no plan goes on that was begun
        for another: the controller's ends with `changed_under_plan`, also for another threshold, an operator's begins anew.

        So does a lower `expert_lean_between`, a higher one from the next window. At 0 the router chooses alone again,
        and cached prefixes go: their KV may be of experts that it would not have chosen.
        """
        before, after, self.config = self.config.batch_processing, config.batch_processing, config
        if after.expert_balance_weight != before.expert_balance_weight:
            self._mover.set_balance_weight(after.expert_balance_weight)
            self._planning.begin_anew()
        is_other_plan = any(getattr(after, name) != getattr(before, name) for name in PLANNED_WITH)
        if is_other_plan and self._decision is not None:
            self._drop_plan(Reason.CHANGED_UNDER_PLAN)
        weight = after.expert_lean_between
        if self._lean is None or 0 < weight >= np.abs(self._lean).max():
            return
        self._lean = np.clip(self._lean, -weight, weight)
        self._mover.set_lean(self._lean)
        if weight == 0:
            self._lean = None
            self._forget_prefixes()

    def on_step(
        self, expert_tokens: np.ndarray, device_rows: np.ndarray, num_steps: int, step_s: float
    ) -> None:
        """A launch was read: tokens [L, E] and rows [L, devices] of all its steps, seconds of one."""
        self._forecast.on_step(expert_tokens, device_rows, num_steps, step_s)
        launch_s = num_steps * step_s
        self._planning_pace.fit(min(launch_s, self._launch_s))  # the shorter one of the last two
        self._launch_s = launch_s

    def turn(self, now_s: float, step_share: float | None) -> None:
        """Between two launches. step_share: a decode step's part of the ITL target; None: not known now."""
        is_over = now_s - self._looked_s >= self.config.batch_processing.dynamic_adjust_window
        if is_over and self._learning is None and not self._is_due and not self._is_others_turn:
            self._looked_s, self._learning = now_s, self._learn()
        start = self._timer()
        while self._think(now_s, step_share):
            if self._timer() - start > SLICE_S / 4:  # the next slice may take a whole one
                break
        if self._planning.is_busy:
            return
        applied = self._mover.num_applied
        try:
            self._mover.turn(self.config.parallel.moves_per_step)
        except (
            MisfitError
        ):  # what was made before it is whole, what waited behind it is gone: serving goes on
            made = self._mover.num_applied - applied
            log.exception("%d moves of experts were made, the next does not fit the placement", made)
            self._drop_plan(Reason.CHANGED_UNDER_PLAN)
        self._is_ordered &= self._mover.num_waiting > 0

    def _think(self, now_s: float, step_share: float | None) -> bool:
        """A slice of what is to be thought of; False when there is nothing left for this turn.

        However short windows are, a plan that is being made gets a slice between two of them.
        """
        is_planning = self._planning.is_busy or self._decision is not None
        if self._learning is not None:
            if not next(self._learning, False):
                self._learning, self._is_others_turn = None, is_planning
                self._is_due = not is_planning and not self._is_ordered
            return True
        self._is_others_turn = False
        if self._planning.is_busy:
            self._plan_some(now_s)
            return False
        if self._decision is not None:
            self._go_on_deciding(now_s, step_share)
        elif self._is_due and not self._is_ordered:
            self._ask(now_s, step_share)
        else:
            return False
        return True

    def carry_out(self, order: ExpertOrder, done: Future[ExpertAnswer]) -> None:
        """An operator's order; `done` ends with the answer, after some turns where a plan has to be made.

        Raises InvalidRequest or Unavailable, and changes nothing, where it cannot.
        """
        num_layers = self._mover.placement.num_layers
        for layer in order.pinned_layers or ():
            if not 0 <= layer < num_layers:
                raise InvalidRequest(
                    f"pinned_layers has {layer}; layers are 0 to {num_layers - 1}", param="pinned_layers"
                )
        if order.rebalance is not None:
            if self._forecast.loads is None:
                raise InvalidRequest(
                    "no traffic has been seen: there is nothing to balance for", param="rebalance"
                )
            self._planning.add(order.rebalance == "apply", done, self._clock())
            self._is_due = False  # else the controller would be asked once the order moves, and windows would wait for it
        if order.pinned_layers is not None:
            self._pin(frozenset(order.pinned_layers))
        if order.is_paused is not None:
            self._is_paused = order.is_paused
            if self._is_paused:
                self._pause(done)
        if order.rebalance is None:
            done.set_result(ExpertAnswer(self.status()))

    @property
    def is_planning(self) -> bool:
        return self._planning.is_busy

    def fail_orders(self, error: Exception) -> None:
        """The engine ends: who waits for a plan is told so."""
        self._planning.fail_all(error)

    def load(self, step_share: float | None) -> float | None:
        """Rows of the busiest device over the mean, times the step's share of its target; None: not known."""
        return (
            None
            if step_share is None or self._forecast.imbalance is None
            else (1 + self._forecast.imbalance) * step_share
        )

    def status(self) -> ExpertStatus:
        placement, mover = self._mover.placement, self._mover
        if placement is not self._shown[0]:  # thousands of numbers that seldom change
            self._shown = placement, tuple(map(tuple, placement.slot_experts.tolist()))
        return ExpertStatus(
            num_devices=placement.num_devices,
            slots_per_device=placement.slots_per_device,
            slot_experts=self._shown[1],
            device_rows=tuple(map(tuple, self._forecast.rows.tolist())),
            imbalance=self._forecast.imbalance,
            waiting_moves=mover.num_waiting,
            applied_moves=mover.num_applied,
            is_paused=self._is_paused,
            pinned_layers=tuple(sorted(self._pinned)),
            reason=self._shown_reason,
            alarm=self._state.alarm,
            overlap=mover.overlap,
            forecast=self._forecast.status,
        )

    def _pause(self, done: Future[ExpertAnswer]) -> None:
        """What was to move does not, but for what the order of this future asks itself."""
        self._drop_plan(Reason.PAUSED)
        stopped = Unavailable(
            f"{Reason.PAUSED}: moves were paused before the plan was made; nothing was moved"
        )
        self._planning.end_applies(stopped, but=done)

    def _pin(self, layers: frozenset[int]) -> None:
        """Moves of pinned layers that wait go; so does all of a plan of the controller's that has some, as it counts them."""
        self._pinned = layers
        if self._mover.drop_layers(layers) and not self._is_ordered:
            self._drop_plan(Reason.CHANGED_UNDER_PLAN)
        self._is_ordered &= self._mover.num_waiting > 0

    def _drop_plan(self, reason: Reason) -> None:
        """All that waits, and the controller's plan with it: it would wait for moves that never come."""
        self._mover.drop()
        self._is_ordered, self._decision = False, None
        now_s = self._clock()
        self._state = without_plan(self._state, now_s)
        self._tell(now_s, reason, 0, {})

    def _tell(
        self, now_s: float, reason: Reason, num_moves: int, inputs: Mapping[str, float | int | str | None]
    ) -> None:
        """Into the log of decisions, if the reason is another than before."""
        if reason == self._reason:
            return
        applied, self._reason = self._mover.num_applied, reason.value
        self._decisions.add(now_s, "expert_placement", applied, applied + num_moves, self._reason, inputs)

    @property
    def _shown_reason(self) -> str:
        if self._planning.is_busy or self._decision is not None:
            return Reason.PLANNING.value
        return "ordered" if self._is_ordered else self._reason

    def _plan_some(self, now_s: float) -> None:
        """A slice of an operator's plan; when it is whole it is answered and, if that was the order, carried out."""
        assert self._forecast.loads is not None  # no order is taken before
        forecast = self._forecast.loads, self._forecast.uncertainty
        made = self._planning.turn(self._mover.placement, *forecast, self._plan_config, self._pinned, now_s)
        if made is None:
            return
        order, plan = made
        if order.is_apply:
            if self._decision is not None:
                self._drop_plan(Reason.CHANGED_UNDER_PLAN)
            self._mover.order(plan.moves)
            self._is_ordered, self._state = bool(plan.moves), RebalanceState()
        order.done.set_result(self._answer(plan))

    def _learn(self) -> Iterator[bool]:
        """From the window that ends, in slices: a turn may end at each yield, which is True as there is more."""
        if self._forecast.has_window:
            yield from self._forecast.learn()
            yield from self._lean_more(self._forecast.window)

    def _ask(self, now_s: float, step_share: float | None) -> None:
        """The controller; where it wants a plan, that is made from now on."""
        self._is_due = False
        self._decision = Decision(self._state, self._observe(now_s, step_share), self._settings(), now_s)
        if not self._decision.num_left:
            self._end_decision(now_s, step_share)

    def _go_on_deciding(self, now_s: float, step_share: float | None) -> None:
        """A slice of the plan, or its end."""
        decision = self._decision
        assert decision is not None
        trouble = decision.trouble(self._observe(now_s, step_share), now_s)
        if decision.num_left and trouble is None:
            self._planning_pace.do(decision.advance, decision.num_left)
        else:
            self._end_decision(now_s, step_share)

    def _end_decision(self, now_s: float, step_share: float | None) -> None:
        assert self._decision is not None
        mover, decision = self._mover, self._decision
        self._decision = None
        self._state, choice = decision.finish(self._observe(now_s, step_share), now_s)
        if choice.is_new_plan:
            self._applied_before = mover.num_applied
            mover.order(choice.moves)
        elif choice.moves:
            mover.add(choice.moves)
        self._tell(now_s, choice.reason, len(choice.moves), choice.inputs)

    def _observe(self, now_s: float, step_share: float | None) -> RebalanceObservation:
        return RebalanceObservation(
            time_s=now_s,
            placement=self._mover.placement,
            expert_load=self.load(step_share),
            loads=self._forecast.loads,
            num_applied=self._mover.num_applied - self._applied_before,
            is_paused=self._is_paused,
            pinned_layers=self._pinned,
        )

    def _lean_more(self, window: np.ndarray) -> Iterator[bool]:
        """A tenth of the way to the bias that this window [L, E] asks for, in slices as `_learn`.

        The window has the bias of before in it, so this is a feedback loop: a short step and fresh loads keep it from swinging
        (docs/log.md has what was tried).
        """
        weight = self.config.batch_processing.expert_lean_between
        if weight == 0:
            return
        yield True
        wanted = lean_between_experts(self._mover.placement, window.astype(np.float64), weight)
        before = np.zeros_like(wanted) if self._lean is None else self._lean
        self._lean = before + np.float32(LEAN_STEP) * (wanted - before)
        num_put = 0
        while num_put < len(wanted):
            yield True
            num_put += self._putting_pace.do(partial(self._put_lean, num_put), len(wanted) - num_put)

    def _put_lean(self, first: int, num_layers: int) -> None:
        """As the bias is by now: it may have been taken back."""
        if self._lean is not None:
            self._mover.set_lean(self._lean, range(first, first + num_layers))

    def _settings(self) -> RebalanceConfig:
        """The mover holds back what is more than a step may take, so a plan is given to it whole."""
        plan = self._plan_config()
        threshold = self.config.batch_processing.expert_load_threshold
        return RebalanceConfig(expert_load_threshold=threshold, moves_per_step=plan.max_moves, plan=plan)

    def _plan_config(self) -> PlanConfig:
        weight = self.config.batch_processing.expert_balance_weight
        return replace(
            PlanConfig(), balance_weight=weight, row_s=self._forecast.row_s, move_s=self._mover.move_s
        )

    def _answer(self, plan: RebalancePlan) -> ExpertAnswer:
        num_layers = self._mover.placement.num_layers
        by_layer = np.bincount([move.layer for move in plan.moves], minlength=num_layers)
        return ExpertAnswer(
            self.status(),
            num_moves=len(plan.moves),
            moves_by_layer=tuple(by_layer.tolist()),
            imbalance_before=float(plan.imbalance_before.mean()),
            imbalance_after=float(plan.imbalance_after.mean()),
            saved_rows=plan.saved_rows,
            cost_s=plan.cost_s,
            saving_s=plan.saving_s,
        )
