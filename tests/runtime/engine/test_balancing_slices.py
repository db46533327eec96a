"""Turns that do one slice each: decisions as in one piece, plans that end when what they are for changes, nobody stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.engine.expert_engine import LAYERS, TOKENS, Served, expert_config


def served_in_slices(**batch_processing: float) -> Served:
    """Until the controller's plan is half made."""
    served = Served(slice_s=1.0, **batch_processing)
    for _ in range(10):
        served.step(step_share=0.7)
        if served.balancing.status().reason == "planning":
            return served
    raise AssertionError("no plan was begun")


def test_a_turn_does_one_slice_and_what_is_decided_is_the_same():
    whole, sliced = Served(), served_in_slices()
    whole.step(step_share=0.7)
    num_planning = 0
    while sliced.balancing.status().reason == "planning":
        assert sliced.mover.num_applied == sliced.mover.num_waiting == 0
        sliced.balancing.turn(sliced.now_s, 0.7)
        num_planning += 1
        assert num_planning < 5 * LAYERS  # another window is learned from meanwhile
    assert num_planning > 2 * LAYERS  # a layer at a time, half of its work
    assert sliced.balancing.status().reason == whole.balancing.status().reason == "started"
    for served in (whole, sliced) * 20:
        served.balancing.turn(served.now_s, None)
    assert whole.mover.num_waiting == sliced.mover.num_waiting == 0
    assert whole.mover.placement == sliced.mover.placement != whole.start


def test_windows_are_learned_from_while_a_plan_is_made():
    """A plan that takes longer than a window ends all the same, where traffic stays what it is."""
    served = served_in_slices()
    predictor = served.balancing._forecast._predictor
    before = learned = predictor.num_windows
    for _ in range(12 * LAYERS):
        if served.balancing.status().reason == "planning":
            learned = predictor.num_windows
            served.step(step_share=0.7)
    assert learned > before + 1
    assert served.decisions.counts["expert_placement", "started"] == 1
    for _ in range(12 * LAYERS):
        served.step(step_share=0.7)
    assert served.mover.num_applied > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda served: served.order(pinned_layers=(1,)), "changed_under_plan"),
        (lambda served: served.order(is_paused=True), "paused"),
        (lambda served: [served.step(0.7, TOKENS[:, ::-1]) for _ in range(3)], "changed_under_plan"),
        (lambda served: setattr(served, "now_s", served.now_s + 100), "overdue"),
    ],
)
def test_a_plan_of_the_controllers_ends_with_the_reason_when_what_it_is_for_changes(change, reason):
    served = served_in_slices()
    change(served)
    for _ in range(6):  # a window is learned from first
        if served.balancing.status().reason == "planning":
            served.balancing.turn(served.now_s, 0.7)
    assert served.balancing.status().reason == reason
    assert served.mover.num_waiting == 0
    assert served.decisions.counts["expert_placement", reason] == 1
    served.order(is_paused=False)
    for _ in range(60):
        served.step(step_share=0.7)
    assert served.mover.num_applied > 0  # the next plan is made


def test_an_order_goes_before_the_controllers_plan_which_ends_with_it():
    served = served_in_slices()
    shown = served.order(rebalance="plan")
    for _ in range(10):
        served.balancing.turn(served.now_s, 0.7) if not shown.done() else None
    assert shown.done()
    assert served.balancing.status().reason == "planning"  # goes on, as nothing was moved
    applied = served.order(rebalance="apply")
    for _ in range(10):
        served.balancing.turn(served.now_s, 0.7) if not applied.done() else None
    assert served.balancing.status().reason == "ordered"
    assert served.decisions.counts["expert_placement", "changed_under_plan"] == 1
    for _ in range(40):
        served.step(step_share=0.1)
    assert served.mover.num_applied == applied.result().num_moves


ORDERS = (
    {"rebalance": "plan"},
    {"rebalance": "apply"},
    {"is_paused": True},
    {"is_paused": False},
    {"pinned_layers": (1,)},
    {"pinned_layers": ()},
)


@given(
    st.lists(
        st.tuples(st.sampled_from([None, *ORDERS]), st.sampled_from([0.1, 0.7]), st.booleans()), max_size=15
    ),
    st.sampled_from([0.0, 1.0]),
)
@settings(deadline=None, max_examples=20)
def test_whatever_is_ordered_when_everybody_is_answered_and_moves_go_on(course, slice_s):
    """Orders fall between any two slices; at the end traffic is what it was and nothing is stuck."""
    served = Served(slice_s=slice_s, expert_lean_between=0.1)
    for _ in range(6):
        served.step()
    answers = []
    for order, step_share, is_other in course:
        answers += [served.order(**order)] if order is not None else []
        served.step(step_share, TOKENS[:, ::-1] if is_other else TOKENS)
    answers += [served.order(is_paused=False), served.order(pinned_layers=())]
    before = served.mover.num_applied
    for _ in range(10):
        served.step(step_share=0.9)
        for _ in range(30):  # no window ends
            served.balancing.turn(served.now_s, 0.9)
    for answer in answers:
        assert answer.done()
        assert answer.exception() is None or str(answer.exception()).startswith(
            ("paused", "changed_under_plan")
        )
    status = served.balancing.status()
    assert (status.alarm, status.is_paused, status.waiting_moves) == (None, False, 0)
    assert status.imbalance < 0.15 or served.mover.num_applied > before


def test_a_bias_that_is_taken_back_while_it_is_put_on_layers_stays_away():
    served = Served(slice_s=1.0, expert_lean_between=0.2)
    for _ in range(5):
        served.step() if not served.slots.lean.any() else None
    assert served.slots.lean.any()
    assert not served.slots.lean[-1].any()  # a layer a turn
    served.balancing.configure(expert_config())
    for _ in range(10):
        served.step()
    assert not served.slots.lean.any()
