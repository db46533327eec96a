"""ExpertPlanning: full rebalances that operators asked for, planned a few layers between two launches.

A full plan of a large model takes many times what a launch may wait. So each turn plans as many layers as take about SLICE_S,
for the placement and the loads of when the plan was begun. Owned by the engine's thread. Imports no JAX.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from runtime.engine.expert_status import ExpertAnswer
from runtime.engine.pace import Pace
from runtime.errors import Unavailable
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanAnew, PlanConfig, RebalancePlan
from runtime.experts.rebalancing import Reason

SLICE_S = 2e-3  # what one turn may take
DEADLINE_S = 25.0  # for the whole plan: before the HTTP caller gives up
MAX_ORDERS = 8  # that wait for their plan


@dataclass(eq=False)
class PlanOrder:
    """Whether the plan is to be carried out or only shown, and who waits for it."""

    is_apply: bool
    done: Future[ExpertAnswer]
    ordered_s: float
    making: PlanAnew | None = None


class ExpertPlanning:
    """Orders in turn, one plan at a time."""

    def __init__(self, timer: Callable[[], float] = time.perf_counter) -> None:
        self._pace = Pace(timer, SLICE_S)
        self._orders = deque[PlanOrder]()

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

    def add(self, is_apply: bool, done: Future[ExpertAnswer], now_s: float) -> None:
        """Raises Unavailable where too many wait already."""
        if len(self._orders) >= MAX_ORDERS:
            raise Unavailable(
                f"{MAX_ORDERS} rebalance plans are being made already; ask again when they are answered",
                retry_after_s=1.0,
            )
        self._orders.append(PlanOrder(is_apply, done, now_s))

    def turn(
        self,
        placement: ExpertPlacement,
        loads: np.ndarray,
        uncertainty: np.ndarray | None,
        config: Callable[[], PlanConfig],
        pinned: frozenset[int],
        now_s: float,
    ) -> tuple[PlanOrder, RebalancePlan] | None:
        """Plan some layers of the first order; the order and its plan once that is whole.

        loads, uncertainty: [L, E], rows in a step and standard errors of them. pinned: layers that keep what they have, as
        of now. An order whose plan is late, or was made for another placement, ends here with the reason; so does one
        whose plan fails.
        """
        order = self._orders[0]
        try:
            if now_s - order.ordered_s > DEADLINE_S:
                raise Unavailable(f"{Reason.OVERDUE}: no plan after {DEADLINE_S:g} s; nothing was moved")
            if order.making is None:
                order.making = PlanAnew(placement, loads, config(), uncertainty)
            elif order.making.placement is not placement:
                raise Unavailable(
                    f"{Reason.CHANGED_UNDER_PLAN}: experts moved while the plan was made; nothing of it is carried out"
                )
            if order.making.num_left:
                self._pace.do(order.making.advance, order.making.num_left)
                return None
            plan = order.making.finish(pinned)
        except Exception as error:
            self._orders.popleft()
            order.done.set_exception(error)
            return None
        self._orders.popleft()
        return order, plan

    def begin_anew(self) -> None:
        """What a plan is made with has changed: the one that is half made starts again, its deadline stays."""
        for order in self._orders:
            order.making = None

    def end_applies(self, error: Exception, but: Future[ExpertAnswer]) -> None:
        """Orders that would move something end with the error, all but the one of this future; plans to show stay."""
        ended = [o for o in self._orders if o.is_apply and o.done is not but]
        self._orders = deque(o for o in self._orders if o not in ended)
        for order in ended:
            order.done.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """The engine ends: nobody waits in vain."""
        while self._orders:
            self._orders.popleft().done.set_exception(error)
