"""Prefill between decodes: the gap of decoding rows against the wait of those who have not begun."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.adaptive.choice import Reason
from runtime.adaptive.waiting import MAX_PREFILLS_IN_A_ROW, decide_waiting
from runtime.schedule.policy import SchedulePolicy
from tests.runtime.adaptive.observations import NOW_S, any_configs, make_config, observations, observe

CONFIG = make_config()  # ttft 2 s of which half is slack, itl 100 ms, window 50 ms
START = SchedulePolicy(micro_batch_size=16)


def decide(config=CONFIG, policy=START, **fields):
    fields = {"num_waiting": 1, "prefill_step_s": 0.03, "decode_step_s": 0.02, **fields}
    return decide_waiting(policy, observe(**fields), config, NOW_S)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 2, Reason.GAP_FITS)),  # 2 * 30 + 2 * 20 = 100 ms
        ({"prefill_step_s": 0.031}, (1, 2, Reason.GAP_FITS)),
        ({"prefill_step_s": 0.07}, (1, 1, Reason.GAP_FITS)),  # 70 + 2 * 20 would be too long
        ({"prefill_step_s": 0.2}, (1, 3, Reason.GAP_TOO_LONG)),  # 200 / 3 + 20 = 87 ms a token
        ({"prefill_step_s": 0.2, "decode_step_s": 0.2}, (1, 8, Reason.GAP_TOO_LONG)),  # no number keeps it
        ({"prefill_step_s": 0.001, "oldest_wait_s": 0.4}, (2, 2, Reason.GAP_FITS)),
        ({"prefill_step_s": 0.01, "oldest_wait_s": 0.5}, (6, 2, Reason.PRESSING)),  # half the slack is used
        ({"prefill_step_s": 0.001, "oldest_wait_s": 0.5}, (8, 2, Reason.PRESSING)),
        ({"prefill_step_s": 0.2, "oldest_wait_s": 1.0}, (2, 1, Reason.URGENT)),
        ({"prefill_step_s": 0.2, "oldest_wait_s": 2.0}, (1, 3, Reason.GAP_TOO_LONG)),  # too late to hurry
        ({"num_running": 0}, (2, 2, Reason.NOTHING_DECODES)),
        ({"decode_step_s": None}, (2, 2, Reason.MISSING_DATA)),
        ({"prefill_step_s": None}, (2, 2, Reason.MISSING_DATA)),
    ],
)
def test_what_is_decided(fields, expected):
    policy, choice = decide(**fields)
    assert (policy.max_prefills_in_a_row, policy.steps_while_waiting, choice.reason) == expected
    assert choice.value == policy.max_prefills_in_a_row


@pytest.mark.parametrize(
    ("fields", "window_s"),
    [
        ({}, 0.03),  # no longer than the prefill step that company saves
        ({"prefill_step_s": 0.08}, 0.05),
        ({"oldest_wait_s": 0.99}, 0.01),  # urgent in 10 ms
        ({"oldest_wait_s": 1.5}, 0.0),
        ({"num_running": 0}, 0.0),
        ({"num_waiting": 0}, 0.0),
        ({"num_waiting": 16}, 0.0),  # a micro-batch is full
        ({"prefill_step_s": None}, 0.0),
    ],
)
def test_the_window_opens_only_where_it_pays(fields, window_s):
    assert decide(**fields)[0].batch_window_s == pytest.approx(window_s)


def test_stale_times_hold_what_was_chosen_on_them():
    policy = replace(START, max_prefills_in_a_row=5, steps_while_waiting=1, batch_window_s=0.02)
    held, choice = decide(policy=policy, time_s=NOW_S - 3)
    assert choice.reason is Reason.STALE
    assert (held.max_prefills_in_a_row, held.steps_while_waiting, held.batch_window_s) == (5, 1, 0.02)
    held, choice = decide(policy=policy, decode_step_s=None)
    assert (held.max_prefills_in_a_row, choice.reason) == (5, Reason.MISSING_DATA)


@pytest.mark.parametrize(
    ("batch", "field", "expected"),
    [
        ({}, "urgent_wait_s", 1.0),
        ({"slo": {"ttft": "4s"}}, "urgent_wait_s", 2.0),
        ({"controller": {"ttft_slack": 0.25}}, "urgent_wait_s", 0.5),
        ({}, "length_multiple", 64),
        ({"controller": {"length_multiple": 128}}, "length_multiple", 128),
        ({"controller": {"like_lengths": False}}, "length_multiple", 0),
        ({"dynamic_batch_window": "20ms"}, "batch_window_s", 0.02),
        ({"enable_dynamic_batch": False}, "batch_window_s", 0.0),
        ({"slo": {"itl": "60ms"}}, "max_prefills_in_a_row", 1),
    ],
)
def test_config_steers(batch, field, expected):
    assert getattr(decide(make_config(**batch))[0], field) == pytest.approx(expected)


@given(observations(), any_configs(), st.integers(1, 8), st.floats(0, 1))
def test_bounds_hold(obs, config, prefills, window_s):
    start = replace(START, max_prefills_in_a_row=prefills, batch_window_s=window_s)
    policy, _ = decide_waiting(start, obs, config, NOW_S)
    assert 1 <= policy.max_prefills_in_a_row <= MAX_PREFILLS_IN_A_ROW
    assert 1 <= policy.steps_while_waiting <= 8
    assert policy.min_prefill_tokens in (0, *obs.prefill_step_s_by_tokens)
    assert 0 <= policy.batch_window_s <= config.batch_processing.dynamic_batch_window


@given(observations(is_sane=True), st.floats(0, 0.3), st.floats(0, 0.3))
def test_a_slower_prefill_is_never_repeated_more_often(obs, one, other):
    fast, slow = sorted((one, other))
    counts = [
        decide_waiting(START, replace(obs, prefill_step_s=s), CONFIG, NOW_S)[0].max_prefills_in_a_row
        for s in (fast, slow)
    ]
    assert counts[0] >= counts[1]


@given(observations(is_sane=True), any_configs(enable_dynamic_batch=True))
def test_the_gap_or_else_the_promise_over_an_answer_is_kept(obs, config):
    """Unless someone is urgent: the gap fits the target, or one prefill step goes with the least number of decode
    steps that keep the time for each token, or with as many as a launch may have."""
    policy, choice = decide_waiting(START, obs, config, NOW_S)
    prefills, steps, itl_s = policy.max_prefills_in_a_row, policy.steps_while_waiting, config.slo.itl

    def token_s(n: int) -> float:
        return prefills * obs.prefill_step_s / n + obs.decode_step_s

    is_exempt = choice.reason in (Reason.URGENT, Reason.NOTHING_DECODES)
    if is_exempt or prefills * obs.prefill_step_s + steps * obs.decode_step_s <= itl_s * (1 + 1e-9):
        return
    assert prefills == 1
    most = min(config.ladder.max_decode_steps, 8)
    assert steps == most or token_s(steps) <= itl_s * (1 + 1e-9)
    assert steps == 1 or token_s(steps - 1) > itl_s * (1 - 1e-9)


def test_while_the_line_is_too_long_prefills_are_held_until_they_are_nearly_as_efficient_as_can_be():
    times = {
        16: 0.003,
        64: 0.0068,
        256: 0.0145,
        512: 0.03,
        1024: 0.068,
    }  # 5.3, 9.4, 17.7, 17.1, 15.1 tokens a ms
    assert decide(prefill_step_s_by_tokens=times)[0].min_prefill_tokens == 512
    assert decide(prefill_step_s_by_tokens={512: 0.03})[0].min_prefill_tokens == 0
    off = make_config(enable_dynamic_batch=False)
    assert decide(off, prefill_step_s_by_tokens=times)[0].min_prefill_tokens == 0
