"""Orders and live settings that come between any two slices of what the balancing is thinking of."""

import pytest

from runtime.experts.rebalance_plan import PlanAnew
from tests.runtime.engine.expert_engine import LAYERS, Served, expert_config


@pytest.mark.parametrize("num_turns", range(4 * LAYERS))
def test_all_of_an_order_is_made_whatever_is_thought_of_when_it_comes(num_turns):
    """Learning, about to ask the controller, planning: its moves never take the place of the operator's."""
    served = Served(slice_s=1.0)
    while served.balancing.status().forecast is None:
        served.step(step_share=0.9)
    for _ in range(num_turns):  # no window ends
        served.balancing.turn(served.now_s, 0.9)
    before = served.mover.num_applied
    applied = served.order(rebalance="apply")
    while not applied.done():
        served.step(step_share=0.9)
    num_moves = applied.result().num_moves
    assert num_moves > 0
    for _ in range(num_moves):
        if served.balancing.status().reason == "ordered":
            served.step(step_share=0.9)
    assert served.mover.num_applied == before + num_moves


CHANGES = {"expert_balance_weight": 0.1, "expert_load_threshold": 0.6}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_ends_the_controllers_plan_that_is_made_with_another(name):
    served = Served(slice_s=1.0)
    while served.balancing.status().reason != "planning":
        served.step(step_share=0.7)
    served.balancing.configure(expert_config(expert_lean_between=0.1))  # no plan goes by it
    assert served.balancing.status().reason == "planning"
    served.balancing.configure(expert_config(**{name: CHANGES[name]}))
    assert served.balancing.status().reason == "changed_under_plan"
    assert served.decisions.counts["expert_placement", "changed_under_plan"] == 1
    for _ in range(60):
        served.step(step_share=0.7)
    assert served.mover.num_applied > 0  # the next plan is made


def test_an_operators_plan_is_made_with_the_weight_that_holds_when_it_is_whole(monkeypatch):
    served, made = Served(), []
    served.step()
    monkeypatch.setattr(
        "runtime.engine.expert_planning.PlanAnew",
        lambda placement, loads, config, uncertainty: (
            made.append(config.balance_weight) or PlanAnew(placement, loads, config, uncertainty)
        ),
    )
    done = served.order(rebalance="plan")
    served.step()
    served.balancing.configure(expert_config(expert_balance_weight=0.1))
    for _ in range(3 * LAYERS):
        served.step() if not done.done() else None
    assert done.result(0).num_moves > 0
    assert made == [0.5, 0.1]
