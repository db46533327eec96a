"""Plans made in slices: short turns, the same plan in the end, and every order is answered, whatever happens to it."""

from concurrent.futures import Future

import numpy as np
import pytest

from runtime.engine.expert_planning import DEADLINE_S, MAX_ORDERS, SLICE_S, ExpertPlanning
from runtime.errors import Unavailable
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanAnew, PlanConfig, plan_anew
from tests.runtime.experts.expert_cases import zipf

START = ExpertPlacement.uniform(12, 32, 4, 9)
LOADS = zipf(12, 32)


@pytest.fixture
def layer_s(monkeypatch) -> list[float]:
    """Seconds that one layer takes on the fake clock: written before a slice, counted by the clock that comes with it."""
    now = [0.0, 0.0]  # clock, cost of a layer
    advance = PlanAnew.advance

    def costly(self, num_layers):
        now[0] += now[1] * min(num_layers, self.num_left)
        advance(self, num_layers)

    monkeypatch.setattr(PlanAnew, "advance", costly)
    return now


def turn(planning, now_s=0.0, placement=START, pinned=frozenset(), uncertainty=None):
    return planning.turn(placement, LOADS, uncertainty, PlanConfig, pinned, now_s)


@pytest.mark.parametrize("cost_s", [SLICE_S / 5, SLICE_S / 2, 3 * SLICE_S])
def test_a_turn_takes_what_it_may_and_at_least_a_layer(layer_s, cost_s):
    layer_s[1] = cost_s
    planning = ExpertPlanning(lambda: layer_s[0])
    done: Future = Future()
    planning.add(True, done, 0.0)
    spent, made = [], None
    while made is None:
        before = layer_s[0]
        made = turn(planning)
        spent.append(layer_s[0] - before)
    assert max(spent) <= max(SLICE_S, cost_s) * 1.001
    assert len(spent) <= 2 + 12 * max(1, cost_s / SLICE_S)
    order, plan = made
    assert (order.is_apply, order.done, planning.is_busy) == (True, done, False)
    assert plan.moves == plan_anew(START, LOADS, PlanConfig()).moves
    assert not done.done()  # whoever carries the plan out answers


def test_what_the_forecast_is_unsure_of_is_in_the_plan():
    uncertainty = np.zeros_like(LOADS)
    uncertainty[:, LOADS[0].argsort()[:4]] = LOADS.max()
    planning = ExpertPlanning()
    planning.add(True, Future(), 0.0)
    made = None
    while made is None:
        made = turn(planning, uncertainty=uncertainty)
    assert made[1].moves == plan_anew(START, LOADS, PlanConfig(), uncertainty=uncertainty).moves
    assert made[1].moves != plan_anew(START, LOADS, PlanConfig()).moves


def test_layers_pinned_while_the_plan_was_made_stay():
    planning = ExpertPlanning()
    planning.add(True, Future(), 0.0)
    assert turn(planning) is None
    made = None
    while made is None:
        made = turn(planning, pinned=frozenset({0}))
    assert {move.layer for move in made[1].moves} == set(range(1, 12))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"now_s": DEADLINE_S + 1}, "overdue: no plan after 25 s"),
        ({"placement": ExpertPlacement.uniform(12, 32, 4, 9)}, "changed_under_plan: experts moved"),
        ({"pinned": frozenset({99})}, r"pinned_layers must be in"),
    ],
)
def test_a_plan_that_cannot_hold_is_dropped_with_its_reason_and_the_next_is_made(later, message):
    planning = ExpertPlanning()
    dropped, other = Future(), Future()
    planning.add(True, dropped, 0.0)
    planning.add(False, other, 20.0)
    turn(planning)
    while not dropped.done():
        assert turn(planning, **later) is None
    with pytest.raises((Unavailable, ValueError), match=message):
        dropped.result(0)
    made = None
    while made is None:
        made = turn(planning, now_s=21.0)
    assert made[0].done is other


def test_only_so_many_wait_and_all_are_told_of_the_end():
    planning = ExpertPlanning()
    orders = [Future() for _ in range(MAX_ORDERS)]
    for done in orders:
        planning.add(False, done, 0.0)
    with pytest.raises(Unavailable, match="8 rebalance plans"):
        planning.add(False, Future(), 0.0)
    planning.fail_all(Unavailable("the engine is stopped"))
    for done in orders:
        with pytest.raises(Unavailable, match="stopped"):
            done.result(0)
    assert not planning.is_busy
