"""The balancing between two launches: windows become moves, orders are planned without a stall, and who waits is answered."""

from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from runtime.engine.commands import MoveExperts
from runtime.engine.expert_status import ExpertOrder
from runtime.errors import InvalidRequest, Unavailable
from runtime.experts.placement import ExpertPlacement, Move
from runtime.experts.rebalance_plan import PlanAnew
from runtime.experts.shares import device_loads
from tests.runtime.engine.expert_engine import EXPERTS, LAYERS, TOKENS, Served, expert_config


def test_a_full_load_moves_experts_until_devices_are_even():
    served = Served()
    for _ in range(40):
        served.step(step_share=0.7)
    before, after = (device_loads(p, TOKENS).max() for p in (served.start, served.mover.placement))
    assert after < before
    assert served.mover.num_applied > 0
    assert any(reason == "started" for _, reason in served.decisions.counts)


def test_a_light_load_moves_nothing():
    served = Served()
    for _ in range(10):
        served.step(step_share=0.1)
    assert served.mover.num_applied == 0
    assert served.balancing.status().reason == "below_threshold"


def test_an_order_is_planned_in_later_turns_and_nothing_moves_meanwhile():
    served = Served()
    served.step()
    shown, applied = served.order(rebalance="plan"), served.order(rebalance="apply")
    assert not shown.done()
    assert served.balancing.is_planning
    assert served.balancing.status().reason == "planning"
    while not applied.done():
        assert served.mover.placement is served.start
        served.step(step_share=0.9)  # the controller would move something
    assert (shown.result().num_moves, shown.result().imbalance_after) == (
        applied.result().num_moves,
        applied.result().imbalance_after,
    )
    assert served.balancing.status().reason == "ordered"
    assert applied.result().status.waiting_moves == applied.result().num_moves > 0
    for _ in range(100):
        served.step()
    assert served.mover.num_applied == applied.result().num_moves
    assert sum(applied.result().moves_by_layer) == applied.result().num_moves


def test_a_pause_ends_what_was_ordered_before_it_and_only_that():
    served = Served()
    served.step()
    applied, shown = served.order(rebalance="apply"), served.order(rebalance="plan")
    assert served.order(is_paused=True).result(0).status.is_paused
    with pytest.raises(Unavailable, match=r"^paused: "):
        applied.result(0)
    for _ in range(10):
        served.step(step_share=0.9)
    assert shown.result(0).num_moves > 0
    assert (served.mover.num_applied, served.balancing.status().reason) == (0, "paused")
    both = served.order(rebalance="apply", is_paused=True)  # this rebalance, and then nothing by itself
    while not both.done():
        served.step()
    assert served.mover.num_waiting > 0
    assert served.order(is_paused=True).result(0).status.waiting_moves == 0
    assert served.balancing.status().reason == "paused"


def served_with_a_plan_under_way() -> Served:
    served = Served()
    while not served.mover.num_waiting:
        served.step(step_share=0.9)
    return served


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pinned_layer_stays_from_then_on_and_the_plan_that_moved_it_is_made_anew(layer):
    served = served_with_a_plan_under_way()
    before = served.mover.placement.slot_experts[layer].tolist()
    served.order(pinned_layers=(layer,)).result(0)
    for _ in range(40):  # longer than the controller's heartbeat
        served.step(step_share=0.9)
    assert served.mover.placement.slot_experts[layer].tolist() == before
    assert served.balancing.status().alarm is None
    if layer:
        assert served.mover.placement != served.start


def test_an_ordered_rebalance_goes_on_without_the_layers_pinned_meanwhile():
    served = Served()
    served.step()
    applied = served.order(rebalance="apply")
    while not applied.done():
        served.step()
    by_layer = applied.result().moves_by_layer
    served.order(pinned_layers=(2,)).result(0)
    for _ in range(40):
        served.step()
    np.testing.assert_array_equal(served.mover.placement.slot_experts[2], served.start.slot_experts[2])
    assert served.mover.num_applied == sum(by_layer[:2]) > 0
    served.order(pinned_layers=()).result(0)
    assert served.balancing.status().reason != "ordered"


@pytest.mark.parametrize(
    ("wish", "undone", "reason"),
    [
        ({"is_paused": True}, {"is_paused": False}, "paused"),
        ({"pinned_layers": (0, 1, 2)}, {"pinned_layers": ()}, "changed_under_plan"),
    ],
)
def test_what_is_stopped_and_allowed_again_at_once_leaves_no_plan_to_wait_for(wish, undone, reason):
    """The controller never saw it: it would wait for dropped moves until an alarm."""
    served = served_with_a_plan_under_way()
    served.order(**wish).result(0)
    assert (served.mover.num_waiting, served.balancing.status().reason) == (0, reason)
    served.order(**undone).result(0)
    for _ in range(20):
        served.step(step_share=0.9)
        assert served.balancing.status().alarm is None
    assert served.decisions.counts["expert_placement", reason] == 1


def test_moves_before_one_that_does_not_fit_are_made_and_told(caplog):
    served = served_with_a_plan_under_way()
    applied, good = served.mover.num_applied, served.mover._waiting[0]
    served.mover.order(
        [good, Move(good.layer, good.to_slot, (good.expert + 1) % EXPERTS, good.from_slot), good]
    )
    served.step(step_share=None)
    assert served.mover.num_applied == applied + 1
    assert "1 moves of experts were made, the next does not fit the placement" in caplog.text
    assert (served.mover.num_waiting, served.balancing.status().reason) == (0, "changed_under_plan")
    for _ in range(20):
        served.step(step_share=0.9)
        assert served.balancing.status().alarm is None


def test_nothing_of_a_plan_that_is_overdue_is_moved():
    served = served_with_a_plan_under_way()
    before = served.mover.placement
    served.now_s += 100
    served.balancing.turn(served.now_s, None)
    assert served.balancing.status().reason == "overdue"
    assert "overdue" in served.balancing.status().alarm
    assert (served.mover.num_waiting, served.mover.placement) == (0, before)


def test_plans_are_for_the_hour_that_comes_and_for_what_is_uncertain(monkeypatch):
    """Two kinds of traffic change with the hour, each window: nothing but the clock says which one comes after an odd one."""
    served, made = Served(), []
    monkeypatch.setattr(
        "runtime.engine.expert_planning.PlanAnew",
        lambda placement, loads, config, uncertainty: (
            made.append((loads, uncertainty)) or PlanAnew(placement, loads, config)
        ),
    )
    kinds = TOKENS, TOKENS[:, ::-1]
    served.hour = lambda: 12.5 * (served.now_s % 2)
    for window in range(60):
        served.step(tokens=kinds[window % 2])
    served.hour = lambda: 0.0
    served.order(rebalance="plan")
    served.step(tokens=kinds[1])
    loads, uncertainty = made[0]
    assert np.abs(loads - kinds[0]).sum() < 0.5 * np.abs(loads - kinds[1]).sum()
    assert uncertainty.shape == loads.shape
    assert (uncertainty >= 0).all()


def test_a_placement_that_changed_ends_the_order_with_its_reason():
    served = Served()
    served.step()
    done = served.order(rebalance="apply")
    served.step()
    served.mover.placement = ExpertPlacement.uniform(LAYERS, EXPERTS, 4, 5)
    served.slots.weights = served.mover.placement.slot_experts.copy()
    served.step()
    with pytest.raises(Unavailable, match="changed_under_plan"):
        done.result(0)
    assert served.mover.num_waiting == 0


def test_leaning_between_experts_is_off_unless_asked_for_and_taken_back_with_it():
    served = Served()
    served.step()
    assert not served.slots.lean.any()
    served.balancing.configure(expert_config(expert_lean_between=0.2))
    sizes = []
    for _ in range(8):
        served.step()
        sizes.append(np.abs(served.slots.lean).max())
    busy, idle = (getattr(device_loads(served.start, TOKENS)[0], f"arg{m}")() for m in ("max", "min"))
    by_device = served.slots.lean[0][served.start.device_experts[0]].mean(axis=1)
    assert by_device[busy] < 0 < by_device[idle]
    assert 0 < sizes[0] < sizes[-1] <= 0.2
    served.balancing.configure(expert_config(expert_lean_between=0.2))
    assert np.abs(served.slots.lean).max() == sizes[-1]
    served.balancing.configure(expert_config(expert_lean_between=0.01))
    assert np.abs(served.slots.lean).max() == pytest.approx(0.01)  # at once, without a turn
    assert served.num_forgotten == 0
    served.balancing.configure(expert_config())
    assert not served.slots.lean.any()
    assert served.num_forgotten == 1
    served.balancing.configure(expert_config())
    served.step()
    assert served.num_forgotten == 1


def test_the_weight_goes_to_the_devices_when_it_changes():
    served = Served(expert_balance_weight=0.5)
    served.step()
    served.balancing.configure(expert_config(expert_balance_weight=0.5))
    assert served.slots.balance_weights == []  # the engine started with it
    served.balancing.configure(expert_config(expert_balance_weight=0.25))
    assert served.slots.balance_weights == [0.25]  # at once, without a turn
    served.balancing.configure(expert_config(expert_balance_weight=0.25))
    served.step()
    assert served.slots.balance_weights == [0.25]


def test_an_order_that_does_not_fit_changes_nothing():
    served = Served()
    for wish, field in (
        ({"rebalance": "apply", "is_paused": True}, "no traffic has been seen"),
        ({"pinned_layers": (0, LAYERS), "is_paused": True}, "pinned_layers has 3; layers are 0 to 2"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            served.order(**wish).result(0)
    status = served.balancing.status()
    assert (status.is_paused, status.pinned_layers) == (False, ())


def test_nobody_waits_for_an_engine_that_ended():
    served = Served()
    served.step()
    done = served.order(rebalance="plan")
    served.balancing.fail_orders(Unavailable("the engine is stopped"))
    with pytest.raises(Unavailable, match="stopped"):
        done.result(0)


def test_an_order_whose_caller_gave_up_is_not_carried_out():
    served = Served()
    done: Future = Future()
    done.cancel()
    MoveExperts(ExpertOrder(is_paused=True), served.balancing.carry_out, done).run()
    assert not served.balancing.status().is_paused
    with pytest.raises(CancelledError):
        done.result(0)


def test_a_caller_that_gives_up_while_its_plan_is_made_harms_nobody():
    served = Served()
    served.step()
    done = served.order(rebalance="plan")
    assert not done.cancel()
    for _ in range(10):
        served.step()
    assert done.result(0).num_moves > 0


def test_what_waits_is_balanced_for_before_a_token_of_it_is_computed():
    """Two kinds of text take turns; the plan that is made while one runs is for the other, which waits."""
    served, kinds = Served(), {"code": TOKENS, "chat": TOKENS[:, ::-1].copy()}
    for turn in range(24):
        now, coming = ("code", "chat") if turn % 2 else ("chat", "code")
        served.mixes = {now: 100.0}, {coming: 100.0}
        served.step(tokens=kinds[now])
    forecast, loads = served.balancing.status().forecast, served.balancing._forecast.loads
    assert forecast is not None
    assert (forecast.source, forecast.next_traffic) == ("mix", {"chat": 1.0})
    assert forecast.errors["mix"] < 0.1 * forecast.errors["last_window"]
    assert loads is not None
    np.testing.assert_allclose(loads, kinds["chat"], rtol=0.05)
