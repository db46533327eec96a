"""The controller: when it starts and ends, plans step by step, alarms, and what must hold for any course of events."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.placement import ExpertPlacement, apply
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.rebalancing import (
    Decision,
    Reason,
    RebalanceConfig,
    RebalanceObservation,
    RebalanceState,
    decide_rebalancing,
)
from tests.runtime.experts.expert_cases import zipf

START = ExpertPlacement.uniform(3, 32, 4, 9)
LOADS = zipf(3, 32)
CONFIG = RebalanceConfig(moves_per_step=3, plan=PlanConfig(balance_weight=0.5))
NOW_S = 100.0


def observe(**fields):
    return RebalanceObservation(
        **{"time_s": NOW_S, "placement": START, "expert_load": 0.9, "loads": LOADS} | fields
    )


def decide(state=None, config=CONFIG, now_s=NOW_S, **fields):
    return decide_rebalancing(state or RebalanceState(), observe(**{"time_s": now_s} | fields), config, now_s)


def started():
    state, choice = decide()
    assert choice.reason is Reason.STARTED
    return state, choice


def test_it_starts_above_the_threshold_and_ends_below_its_release():
    assert decide(expert_load=0.75)[1].reason is Reason.BELOW_THRESHOLD
    assert decide(expert_load=0.7501)[1].reason is Reason.STARTED
    active = RebalanceState(is_active=True)
    assert decide(active, expert_load=0.70)[1].reason is Reason.STARTED  # in the band: goes on once started
    assert decide(expert_load=0.70)[1].reason is Reason.BELOW_THRESHOLD  # but does not start
    state, choice = decide(active, expert_load=0.67)
    assert choice.reason is Reason.BELOW_THRESHOLD
    assert not state.is_active


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"placement": ExpertPlacement.uniform(3, 32, 1, 32)}, Reason.ONE_DEVICE),
        ({"is_paused": True}, Reason.PAUSED),
        ({"time_s": NOW_S - 2.1}, Reason.STALE),
        ({"time_s": float("nan")}, Reason.STALE),
        ({"expert_load": None}, Reason.MISSING_DATA),
        ({"expert_load": float("nan")}, Reason.MISSING_DATA),
        ({"loads": None}, Reason.MISSING_DATA),
        ({"loads": np.zeros((3, 32))}, Reason.NOT_WORTH),
        ({"pinned_layers": frozenset({0, 1, 2})}, Reason.NOT_WORTH),
    ],
)
def test_when_nothing_moves(fields, reason):
    _, choice = decide(**fields)
    assert (choice.reason, choice.moves) == (reason, ())


def test_a_plan_is_given_out_a_few_moves_at_a_time():
    state, choice = started()
    placement, given = START, list(choice.moves)
    assert len(given) == 3
    assert decide(state)[1].reason is Reason.WAITING
    num_applied = 0
    while choice.reason is not Reason.FINISHED:
        for move in choice.moves:
            placement = apply(placement, move)
        num_applied += len(choice.moves)
        state, choice = decide(state, placement=placement, num_applied=num_applied)
        assert choice.reason in (Reason.MOVING, Reason.FINISHED)
        assert len(choice.moves) <= 3
        given += choice.moves
    assert tuple(given) == started()[0].plan.moves
    assert state.plan is None
    assert choice.is_new_plan


@pytest.mark.parametrize("late_s", [5.1, 31.0])
def test_a_silent_plan_is_dropped_with_an_alarm_until_one_is_carried_out(late_s):
    state, _ = started()
    assert decide(state, now_s=NOW_S + 4.9)[1].alarm is None
    state, choice = decide(state, now_s=NOW_S + late_s)
    assert choice.reason is Reason.OVERDUE
    assert "0 of" in choice.alarm
    assert state.plan is None
    state, choice = decide(state, now_s=NOW_S + late_s + 1)
    assert choice.reason is Reason.STARTED
    assert choice.alarm is not None  # stands
    placement = START
    for move in state.plan.moves:
        placement = apply(placement, move)
    everything = replace(state, num_given=len(state.plan.moves))
    state, choice = decide(everything, now_s=NOW_S + late_s + 2, placement=placement, num_applied=10**6)
    assert (choice.reason, choice.alarm) == (Reason.FINISHED, None)


def test_a_slow_plan_that_moves_all_the_time_still_has_a_deadline():
    config = replace(CONFIG, moves_per_step=1, plan=PlanConfig(max_rounds=8))
    state, choice = decide(config=config)
    assert len(state.plan.moves) > 10
    placement, num_applied, now_s = START, 0, NOW_S
    while choice.reason is not Reason.OVERDUE:
        for move in choice.moves:
            placement = apply(placement, move)
        num_applied += len(choice.moves)
        now_s += 4
        assert now_s < NOW_S + 60
        state, choice = decide(state, config, now_s, placement=placement, num_applied=num_applied)
    assert now_s > NOW_S + 30


def test_stale_observations_do_not_stop_the_clock_of_a_plan():
    state, _ = started()
    assert decide(state, now_s=NOW_S + 3, time_s=NOW_S)[1].reason is Reason.STALE
    assert decide(state, now_s=NOW_S + 6, time_s=NOW_S)[1].reason is Reason.OVERDUE


def test_pause_and_pins_end_a_plan_at_once():
    state, _ = started()
    paused, choice = decide(state, is_paused=True)
    assert (choice.reason, paused.plan, paused.is_active) == (Reason.PAUSED, None, False)
    given = state.num_given
    placement = START
    for move in state.plan.moves[:given]:
        placement = apply(placement, move)
    layers = frozenset(move.layer for move in state.plan.moves)
    fields = {"placement": placement, "num_applied": given}
    assert decide(state, **fields, pinned_layers=layers)[1].reason is Reason.CHANGED_UNDER_PLAN
    waiting, choice = decide(
        state, pinned_layers=layers
    )  # moves that were given out and wait are taken back too
    assert (choice.reason, choice.is_new_plan, waiting.plan) == (Reason.CHANGED_UNDER_PLAN, True, None)
    assert decide(state, **fields)[1].reason is Reason.MOVING
    elsewhere = ExpertPlacement(np.roll(START.slot_experts, 9, axis=1), 4, 32)
    assert decide(state, **fields | {"placement": elsewhere})[1].reason is Reason.CHANGED_UNDER_PLAN


def test_plans_are_a_dwell_apart():
    config = replace(CONFIG, dwell_s=10)
    ended = RebalanceState(is_active=True, ended_s=NOW_S - 9.9)
    assert decide(ended, config)[1].reason is Reason.DWELL
    assert decide(replace(ended, ended_s=NOW_S - 10), config)[1].reason is Reason.STARTED


@pytest.mark.parametrize("loads", [np.ones((2, 32)), np.full((3, 32), np.nan)])
def test_loads_of_the_wrong_shape_are_refused(loads):
    with pytest.raises(ValueError, match=r"loads must be (\[3, 32\], not \[2, 32\]|finite)"):
        decide(loads=loads)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.3, 0.5]),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([frozenset(), frozenset({1})]),
    st.sampled_from([0.1, 0.9]),
)
@settings(deadline=None, max_examples=40)
def test_a_decision_made_in_slices_is_the_same_decision(seed, width, weight, max_moves, pinned, load):
    loads = zipf(3, 32, seed=seed) * np.random.default_rng(seed).random((3, 1))
    config = replace(CONFIG, plan=PlanConfig(balance_weight=weight, max_moves=max_moves))
    obs = observe(loads=loads, pinned_layers=pinned, expert_load=load)
    decision = Decision(RebalanceState(), obs, config, NOW_S)
    while decision.num_left:
        decision.advance(width)
    (state, choice), (whole, all_at_once) = (
        decision.finish(obs, NOW_S),
        decide_rebalancing(RebalanceState(), obs, config, NOW_S),
    )
    assert (choice.moves, choice.reason) == (all_at_once.moves, all_at_once.reason)
    assert (choice.is_new_plan, choice.inputs) == (all_at_once.is_new_plan, all_at_once.inputs)
    assert (state.plan is None) == (whole.plan is None)
    if state.plan is not None:
        assert state.plan.moves == whole.plan.moves
        np.testing.assert_array_equal(state.plan.imbalance_after, whole.plan.imbalance_after)
    assert (state.started_s, state.ended_s) == (whole.started_s, whole.ended_s)


def half_made():
    decision = Decision(RebalanceState(), observe(), CONFIG, NOW_S)
    decision.advance(1)
    assert decision.num_left
    return decision


@pytest.mark.parametrize(
    ("fields", "late_s", "reason"),
    [
        ({"placement": ExpertPlacement.uniform(3, 32, 4, 9)}, 1, Reason.CHANGED_UNDER_PLAN),
        ({"pinned_layers": frozenset({2})}, 1, Reason.CHANGED_UNDER_PLAN),
        ({"loads": LOADS[:, ::-1]}, 1, Reason.CHANGED_UNDER_PLAN),
        ({"loads": None}, 1, Reason.CHANGED_UNDER_PLAN),
        ({"is_paused": True}, 1, Reason.PAUSED),
        ({}, 30.1, Reason.OVERDUE),
    ],
)
def test_a_plan_that_is_of_no_use_any_more_is_dropped_while_it_is_made(fields, late_s, reason):
    decision, now = half_made(), observe(**fields)
    assert decision.trouble(now, NOW_S + late_s) is reason
    state, choice = decision.finish(now, NOW_S + late_s)
    assert (choice.reason, choice.moves, state.plan, choice.is_new_plan) == (reason, (), None, False)
    assert state.ended_s == NOW_S + late_s  # the next one is a dwell away
    assert state.is_active == (reason is not Reason.PAUSED)
    if reason is Reason.OVERDUE:
        assert choice.alarm == "rebalance plan overdue: not made 30.1 s after it was begun (deadline 30.0 s)"
        assert decide(state, loads=np.zeros((3, 32)))[1].alarm == choice.alarm  # stands
    else:
        assert choice.alarm is None


def test_a_forecast_that_is_much_the_same_does_not_stop_a_plan_and_time_counts_from_its_end():
    decision, now = half_made(), observe(loads=LOADS * 3 + zipf(3, 32, seed=9) * 0.1)
    with pytest.raises(ValueError, match="layers are not planned yet"):
        decision.finish(now, NOW_S)
    while decision.num_left:
        decision.advance(2)
    state, choice = decision.finish(now, NOW_S + 29)
    assert (choice.reason, state.started_s, choice.inputs["age_s"]) == (Reason.STARTED, NOW_S + 29, 29)
    assert state.plan.moves == started()[0].plan.moves


events = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "expert_load": st.sampled_from([None, 0.1, 0.7, 0.76, 3.0, float("nan")]),
        "is_paused": st.sampled_from([False, False, False, True]),
        "age_s": st.sampled_from([0.0, 0.0, 3.0]),
        "pinned": st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({0, 1, 2})]),
        "applies": st.integers(0, 4),
        "wait_s": st.sampled_from([0.05, 0.05, 6.0, 31.0]),
    }
)


@given(st.lists(events, max_size=12), st.integers(1, 5), st.sampled_from([0.0, 0.2]))
@settings(deadline=None, max_examples=60)
def test_any_course_of_events_keeps_every_placement_valid(course, moves_per_step, weight):
    """An engine that applies what it is given late, in part and never twice."""
    config = replace(CONFIG, moves_per_step=moves_per_step, plan=PlanConfig(balance_weight=weight))
    state, placement, now_s = RebalanceState(), START, NOW_S
    queue, num_applied = [], 0
    for event in course:
        now_s += event["wait_s"]
        obs = observe(
            time_s=now_s - event["age_s"],
            placement=placement,
            loads=zipf(3, 32, seed=event["seed"]),
            expert_load=event["expert_load"],
            is_paused=event["is_paused"],
            pinned_layers=event["pinned"],
            num_applied=num_applied,
        )
        state, choice = decide_rebalancing(state, obs, config, now_s)
        assert len(choice.moves) <= moves_per_step
        assert choice.reason in (Reason.STARTED, Reason.MOVING) or not choice.moves
        assert not any(move.layer in event["pinned"] for move in choice.moves)
        assert not (event["is_paused"] and choice.moves)
        assert (choice.alarm is None) or choice.alarm.startswith("rebalance plan overdue")
        if choice.is_new_plan:
            queue, num_applied = [], 0
        queue += choice.moves
        for move in queue[: event["applies"]]:
            placement = apply(placement, move)  # raises if serving could not go on
        num_applied += min(event["applies"], len(queue))
        queue = queue[event["applies"] :]


@pytest.mark.parametrize(
    ("field", "value"),
    [("expert_load_threshold", 0), ("expert_load_threshold", 1.1), ("release", -0.1), ("moves_per_step", 0),
     ("dwell_s", -1), ("stale_after_s", 0), ("heartbeat_s", float("inf")), ("deadline_s", float("nan")),
     ("jump", 1.1)],
)  # fmt: skip
def test_numbers_are_bounded(field, value):
    with pytest.raises(ValueError, match=f"{field} must be in"):
        RebalanceConfig(**{field: value})
