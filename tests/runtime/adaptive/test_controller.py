"""The controller: what is due when, what is logged, and that a changed config holds at once."""

import pytest

from runtime.adaptive.controller import BATCH_SIZE, INTERLEAVE, MICRO_BATCH, Controller
from runtime.adaptive.decision import DecisionLog
from tests.runtime.adaptive.observations import NOW_S, make_config, observe


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def start(**batch) -> tuple[Controller, DecisionLog]:
    log = DecisionLog(1024)
    return Controller(make_config(**batch), log, Clock()), log


def run(controller: Controller, seconds: float, first_s: float = NOW_S, **fields) -> None:
    """Ticks every 10 ms, where something is due."""
    for i in range(round(seconds * 100)):
        now_s = first_s + i / 100
        if controller.is_due(now_s):
            controller.tick(observe(time_s=now_s, **fields), now_s)


def test_it_starts_at_the_base_within_the_bounds():
    assert start()[0].policy.batch_size == 32
    controller, _ = start(base_batch_size=64, max_batch_size=8, micro_batch_size=40)
    assert (controller.policy.batch_size, controller.policy.micro_batch_size) == (8, 32)
    assert controller.policy.urgent_wait_s == 1.0
    assert controller.policy.length_multiple == 64


def test_each_window_ticks_by_itself_and_every_tick_is_logged():
    controller, log = start()
    run(controller, 1.995, decode_step_s=0.07)  # in the band: nothing moves, all is said
    per_controller = {}
    for (name, _), count in log.counts.items():
        per_controller[name] = per_controller.get(name, 0) + count
    assert per_controller[BATCH_SIZE] == 4  # every 500 ms
    assert 33 <= per_controller[MICRO_BATCH] == per_controller[INTERLEAVE] <= 40  # every 50 ms of 10 ms turns
    assert log.counts[BATCH_SIZE, "in_band"] == 4


def test_a_decision_says_from_what_to_what_and_why():
    controller, log = start()
    policy = controller.tick(observe(), NOW_S)
    by_name = {d.controller: d for d in log.after(0, 10)}
    assert set(by_name) == {BATCH_SIZE, MICRO_BATCH, INTERLEAVE}
    decision = by_name[BATCH_SIZE]
    assert (decision.previous, decision.value, decision.reason) == (32, 48, "load_low")
    assert decision.inputs["load"] == pytest.approx(0.2)
    assert decision.inputs["resource"] == "step_time"
    assert (policy.batch_size, policy.micro_batch_size) == (48, 32)
    assert by_name[MICRO_BATCH].previous == 16
    assert controller.policy is policy


def test_an_idle_engine_climbs_before_anyone_comes():
    controller, _ = start()
    run(controller, 5, num_running=0, used_pages=0, decode_step_s=None)
    assert controller.policy.batch_size == 128


def test_a_changed_window_holds_at_once():
    controller, _ = start(dynamic_adjust_window="60s", dynamic_batch_window="60s")
    controller.tick(observe(), NOW_S)
    assert not controller.is_due(NOW_S + 1)
    controller.set_config(make_config(dynamic_adjust_window="200ms", dynamic_batch_window="60s"))
    assert controller.is_due(NOW_S + 1)
    controller.tick(observe(), NOW_S + 1)
    assert not controller.is_due(NOW_S + 1.19)
    assert controller.is_due(NOW_S + 1.21)


def test_changed_bounds_hold_at_once_and_taking_them_back_restores():
    controller, log = start()
    run(controller, 5, num_running=0)
    controller.set_config(
        make_config(max_batch_size=20, max_micro_batch_size=4, controller={"ttft_slack": 0.1})
    )
    policy = controller.policy
    assert (policy.batch_size, policy.micro_batch_size, policy.urgent_wait_s) == (20, 4, 0.2)
    assert log.counts[BATCH_SIZE, "config"] == 1
    assert (
        controller.tick(observe(num_running=0, time_s=NOW_S + 5), NOW_S + 5).batch_size == 16
    )  # the rung below
    controller.set_config(make_config())
    assert controller.tick(observe(num_running=0, time_s=NOW_S + 6), NOW_S + 6).batch_size == 128


def test_a_new_base_is_started_from_and_off_gives_the_base():
    controller, _ = start()
    run(controller, 5, num_running=0)
    controller.set_config(make_config(base_batch_size=8))
    assert controller.policy.batch_size == 8
    controller.set_config(make_config(base_batch_size=30, enable_dynamic_batch=False, micro_batch_size=5))
    assert (controller.policy.batch_size, controller.policy.micro_batch_size) == (30, 5)
    policy = controller.tick(observe(), NOW_S)
    assert (policy.batch_size, policy.micro_batch_size, policy.batch_window_s) == (30, 5, 0.0)


def test_other_sections_change_nothing():
    controller, log = start()
    controller.tick(observe(), NOW_S)
    before, num = controller.policy, len(log.after(0, 100))
    controller.set_config(make_config().model_copy(update={"ladder": make_config().ladder}))
    assert controller.policy is before
    assert len(log.after(0, 100)) == num
    assert not controller.is_due(NOW_S + 0.01)


def test_a_stale_engine_is_left_alone():
    controller, log = start()
    controller.tick(observe(), NOW_S)
    before = controller.policy
    assert controller.tick(observe(), NOW_S + 10) == before
    assert (
        log.counts[BATCH_SIZE, "stale"]
        == log.counts[MICRO_BATCH, "stale"]
        == log.counts[INTERLEAVE, "stale"]
        == 1
    )
