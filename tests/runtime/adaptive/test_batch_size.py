"""The batch size: small answers, and what must hold for any input."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.adaptive.batch_size import BatchSizeState, decide_batch_size, usable_rungs
from runtime.adaptive.choice import Reason
from runtime.adaptive.load import Resource
from tests.runtime.adaptive.observations import (
    NOW_S,
    any_configs,
    make_config,
    observations,
    observe,
)

CONFIG = make_config()  # alpha 0.5, threshold 0.75, band 0.675 to 0.75, target 100 ms, dwell 1 s
states = st.builds(
    BatchSizeState,
    size=st.integers(1, 300),
    moved_s=st.sampled_from([float("-inf"), NOW_S - 0.5, NOW_S - 2]),
    avoided=st.one_of(st.none(), st.integers(1, 256)),
    avoided_for=st.one_of(st.none(), st.sampled_from(Resource)),
)


def decide(size=32, config=CONFIG, state=None, now_s=NOW_S, **fields):
    state, choice = decide_batch_size(state or BatchSizeState(size), observe(**fields), config, now_s)
    return choice.value, choice.reason


@pytest.mark.parametrize(
    ("size", "fields", "expected"),
    [
        (32, {}, (48, Reason.LOAD_LOW)),  # load 0.2: 32 * 1.37 = 43.7
        (32, {"num_running": 3}, (48, Reason.LOAD_LOW_UNUSED)),
        (2, {"decode_step_s": 0.067}, (4, Reason.LOAD_LOW)),  # 2 * 1.05 = 2.1 still moves
        (32, {"decode_step_s": 0.07}, (32, Reason.IN_BAND)),
        (32, {"decode_step_s": 0.07, "num_waiting": 1}, (48, Reason.QUEUE)),
        (32, {"decode_step_s": 0.08, "num_waiting": 9}, (24, Reason.LOAD_HIGH)),  # 32 * 0.97
        (128, {"decode_step_s": 0.15}, (64, Reason.LOAD_HIGH)),  # 128 * 0.5
        (128, {"decode_step_s": 0.9, "num_running": 128}, (64, Reason.LOAD_HIGH)),  # never less than half
        (64, {"decode_step_s": 0.14, "num_running": 128}, (64, Reason.DRAINING)),  # 70 ms on 64 rows, perhaps
        (64, {"decode_step_s": 0.16, "num_running": 128}, (32, Reason.LOAD_HIGH)),  # 80 ms at least
        (1, {"decode_step_s": 0.15}, (1, Reason.AT_MIN)),
        (128, {}, (128, Reason.AT_MAX)),
        (8, {"decode_rungs": (1, 8)}, (8, Reason.RUNG_NOT_READY)),
        (32, {"decode_rungs": (1, 8)}, (8, Reason.RUNG_NOT_READY)),
        (32, {"decode_rungs": ()}, (32, Reason.RUNG_NOT_READY)),
        (32, {"decode_step_s": None}, (32, Reason.MISSING_DATA)),
        (32, {"time_s": NOW_S - 2.1}, (32, Reason.STALE)),
        (32, {"decode_step_s_by_rows": {48: 0.0751}, "decode_step_s": 0.06}, (32, Reason.STEP_TOO_SLOW)),
        (32, {"decode_step_s_by_rows": {48: 0.0749}, "decode_step_s": 0.06}, (48, Reason.LOAD_LOW)),
        # 20 ms on 32 rows cannot be 90 ms on 48 now: that measurement is old.
        (32, {"decode_step_s_by_rows": {48: 0.09}}, (48, Reason.LOAD_LOW)),
        # The largest of the rungs on the way that is not too slow.
        (64, {"decode_rungs": (64, 65, 90), "num_running": 64, "decode_step_s": 0.06,
              "decode_step_s_by_rows": {90: 0.076}}, (65, Reason.LOAD_LOW)),
        # 48 was not measured, but 40 was.
        (32, {"decode_rungs": (8, 32, 40, 48), "num_running": 8, "decode_step_s_by_rows": {40: 0.08}},
         (32, Reason.STEP_TOO_SLOW)),
    ],
)  # fmt: skip
def test_what_is_decided(size, fields, expected):
    assert decide(size, **fields) == expected


def test_the_published_form_starts_from_base_and_never_passes_its_factor():
    for alpha, largest in ((0.5, 48), (0.8, 57)):
        rungs = tuple(range(1, 129))
        config = make_config(alpha=alpha, controller={"form": "published"})
        for fields in ({"num_running": 0, "used_pages": 0}, {"decode_step_s": 0.0, "num_waiting": 99}):
            assert decide(32, config, decode_rungs=rungs, **fields)[0] <= largest
        idle = {"num_running": 0, "used_pages": 0, "decode_rungs": rungs}
        assert decide(32, config, **idle)[0] == largest
        assert decide(128, config, **idle)[0] == largest


def test_a_rung_that_load_drove_it_from_needs_a_promise():
    state = BatchSizeState(48)
    state, choice = decide_batch_size(state, observe(num_running=48, decode_step_s=0.08), CONFIG, NOW_S)
    assert choice.value == 32
    low = {"state": replace(state, moved_s=0), "num_running": 32}
    assert decide(**low, decode_step_s=0.06) == (32, Reason.DRIVEN_DOWN)  # could be 90 ms on 48 rows
    assert decide(**low, decode_step_s=0.044) == (48, Reason.LOAD_LOW)  # 66 ms at most
    assert decide(**low, decode_step_s=0.06, decode_step_s_by_rows={48: 0.07}) == (32, Reason.DRIVEN_DOWN)
    assert decide(**low, decode_step_s=0.06, decode_step_s_by_rows={48: 0.06}) == (48, Reason.LOAD_LOW)


def test_a_rung_that_memory_drove_it_from_is_judged_by_memory():
    config = make_config(controller={"kv_threshold": 0.75})
    full = observe(num_running=48, used_pages=80)
    state, choice = decide_batch_size(BatchSizeState(48), full, config, NOW_S)
    assert (choice.value, choice.reason, state.avoided_for) == (32, Reason.LOAD_HIGH, Resource.KV_PAGES)
    state = replace(state, moved_s=0)
    assert decide(state=state, config=config, used_pages=54) == (32, Reason.DRIVEN_DOWN)
    assert decide(state=state, config=config, used_pages=40) == (48, Reason.LOAD_LOW)


def test_an_unused_rung_is_not_to_blame():
    state, _ = decide_batch_size(
        BatchSizeState(64), observe(num_running=3, decode_step_s=0.09), CONFIG, NOW_S
    )
    assert state.avoided is None


def test_moves_are_a_dwell_apart_unless_smoothing_is_off():
    moved = BatchSizeState(32, moved_s=NOW_S - 0.9)
    assert decide(state=moved) == (32, Reason.DWELL)
    assert decide(state=moved, config=make_config(controller={"dwell": "800ms"})) == (48, Reason.LOAD_LOW)
    assert decide(state=moved, config=make_config(smoothing=False)) == (48, Reason.LOAD_LOW)
    assert decide(32, make_config(smoothing=False), decode_step_s=0.07) == (48, Reason.LOAD_LOW)  # no band


def test_a_bound_that_goes_away_gives_the_size_back_at_once():
    state, _ = decide_batch_size(BatchSizeState(64), observe(decode_rungs=(1, 2)), CONFIG, NOW_S)
    assert decide(state=state, decode_step_s=0.07)[0] == 64
    assert decide(state=state, config=make_config(max_batch_size=16), decode_step_s=0.07)[0] == 16
    assert decide(state=state, decode_step_s=0.07)[0] == 64


def test_off_means_the_base_within_bounds():
    assert decide(64, make_config(enable_dynamic_batch=False, base_batch_size=30)) == (30, Reason.FIXED)
    off = make_config(enable_dynamic_batch=False, base_batch_size=64, max_batch_size=20)
    assert decide(64, off, decode_step_s=None) == (20, Reason.FIXED)
    assert decide(64, make_config(enable_dynamic_batch=False), decode_rungs=(1, 8)) == (8, Reason.FIXED)


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        ({"enable_dynamic_batch": False}, {}),
        ({"base_batch_size": 64, "controller": {"form": "published"}}, {}),
        ({"controller": {"form": "published"}}, {"size": 64}),
        ({"max_batch_size": 40}, {}),
        ({"expert_load_threshold": 0.25}, {"decode_step_s": 0.06}),
        ({"alpha": 0.0}, {}),
        ({"alpha": 1.0}, {"size": 64, "decode_step_s": 0.03}),
        ({"smoothing": False}, {"decode_step_s": 0.07}),
        ({"controller": {"up_below": 0.5}}, {"decode_step_s": 0.06}),
        ({"controller": {"down_above": 1.5}}, {"decode_step_s": 0.1}),
        ({"controller": {"dwell": "10ms"}}, {"state": BatchSizeState(32, moved_s=NOW_S - 0.1)}),
        ({"controller": {"stale_after": "100ms"}}, {"time_s": NOW_S - 1}),
        ({"slo": {"itl": "20ms"}}, {}),
    ],
)  # fmt: skip
def test_each_field_changes_what_comes_out(batch, fields):
    assert decide(config=make_config(**batch), **fields)[0] != decide(config=CONFIG, **fields)[0]


# What must hold for any input


@given(states, observations(), any_configs())
def test_bounds_hold_and_only_ready_rungs_are_chosen(state, obs, config):
    new, choice = decide_batch_size(state, obs, config, NOW_S)
    batch = config.batch_processing
    assert 1 <= choice.value <= batch.max_batch_size
    assert new.size >= 1
    if choice.reason is Reason.FIXED:
        assert choice.value <= obs.decode_rungs[-1]
    elif obs.decode_rungs and obs.decode_rungs[0] <= batch.max_batch_size:
        assert choice.value in obs.decode_rungs
    elif obs.decode_rungs:
        assert choice.value == batch.max_batch_size
    if config.controller.form == "published" and batch.enable_dynamic_batch and obs.decode_rungs:
        assert choice.value <= max(obs.decode_rungs[0], batch.base_batch_size * (1 + batch.alpha) + 1e-6)


@settings(deadline=None)
@given(states, observations(is_sane=True), any_configs(), st.integers(5, 40))
def test_no_change_of_direction_on_a_constant_observation(state, obs, config, num_ticks):
    sizes = []
    for tick in range(num_ticks):
        now_s = NOW_S + 0.5 * tick
        state, choice = decide_batch_size(state, replace(obs, time_s=now_s), config, now_s)
        sizes.append(choice.value)
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


LOADS = {
    "decode_step_s": st.floats(0, 0.3),
    "used_pages": st.integers(0, 100),
    "expert_load": st.floats(0, 2),
    "exchange_s": st.floats(0, 0.3),
}


@pytest.mark.parametrize("field", LOADS)
@given(states, observations(is_sane=True), any_configs(), st.data())
def test_more_load_never_gives_a_larger_size(field, state, obs, config, data):
    low, high = sorted((data.draw(LOADS[field]), data.draw(LOADS[field])))
    sizes = [
        decide_batch_size(state, replace(obs, **{field: value}), config, NOW_S)[1].value
        for value in (low, high)
    ]
    assert sizes[0] >= sizes[1]


@given(states, observations(is_sane=True), any_configs(), st.integers(0, 50), st.integers(0, 50))
def test_a_longer_queue_never_gives_a_smaller_size(state, obs, config, one, other):
    few, many = sorted((one, other))
    sizes = [
        decide_batch_size(state, replace(obs, num_waiting=n), config, NOW_S)[1].value for n in (few, many)
    ]
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("fault", [Reason.STALE, Reason.MISSING_DATA])
@given(observations(is_sane=True), any_configs(enable_dynamic_batch=True), st.data())
def test_stale_or_missing_data_holds(fault, obs, config, data):
    rungs = usable_rungs(obs.decode_rungs, config)
    state = BatchSizeState(data.draw(st.sampled_from(rungs)))
    if fault is Reason.STALE:
        obs = replace(obs, time_s=NOW_S - config.controller.stale_after - data.draw(st.floats(0.01, 1e6)))
    else:
        obs = replace(obs, num_running=1 + obs.num_running, decode_step_s=None)
    new, choice = decide_batch_size(state, obs, config, NOW_S)
    assert (new, choice.value, choice.reason) == (state, state.size, fault)
