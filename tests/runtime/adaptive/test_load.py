"""The tightest resource counts, and the queue is none."""

import math

import pytest
from hypothesis import given

from runtime.adaptive.load import MAX_LOAD, Load, Resource, largest_use, measured_use, resource_load
from tests.runtime.adaptive.observations import any_configs, make_config, observations, observe

CONFIG = make_config()  # itl 100 ms


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Load(0.2, Resource.STEP_TIME)),
        ({"used_pages": 95}, Load(0.75, Resource.KV_PAGES)),  # kv_threshold counts as expert_load_threshold
        ({"expert_load": 0.7}, Load(0.7, Resource.EXPERTS)),
        ({"exchange_s": 0.09}, Load(0.9, Resource.EXCHANGE)),
        ({"decode_step_s": 0.15}, Load(1.5, Resource.STEP_TIME)),
        ({"num_waiting": 500, "oldest_wait_s": 60.0}, Load(0.2, Resource.STEP_TIME)),
        ({"num_pages": 0, "used_pages": 0}, Load(0.2, Resource.STEP_TIME)),
        ({"decode_step_s": None}, None),
        ({"decode_step_s": math.nan}, None),
        ({"decode_step_s": None, "num_running": 0}, Load(0.1 * 0.75 / 0.95, Resource.KV_PAGES)),
        # The step time of rows that have left is no load: an idle engine must not shrink.
        ({"decode_step_s": 0.15, "num_running": 0}, Load(0.1 * 0.75 / 0.95, Resource.KV_PAGES)),
        ({"decode_step_s": None, "num_running": 0, "num_pages": 0}, Load(0.0, Resource.STEP_TIME)),
    ],
)
def test_the_tightest_resource_counts(fields, expected):
    load = resource_load(observe(**fields), CONFIG)
    if expected is None:
        assert load is None
    else:
        assert load == Load(pytest.approx(expected.value), expected.resource)


def test_the_target_between_tokens_scales_it():
    assert resource_load(observe(), make_config(slo={"itl": "40ms"})).value == pytest.approx(0.5)


def test_use_grows_at_most_in_proportion_to_the_rows_that_run():
    """20 ms on the rung of 32, which 30 rows need, are at most 40 ms on the rung of 64; never less than now."""
    obs = observe(num_running=30, decode_step_s_by_rows={64: 0.03, 96: math.nan})
    assert largest_use(obs, CONFIG, Resource.STEP_TIME, 64) == pytest.approx(0.4)
    assert largest_use(obs, CONFIG, Resource.STEP_TIME, 8) == pytest.approx(0.2)
    assert largest_use(obs, CONFIG, Resource.KV_PAGES, 60) == pytest.approx(0.2 * 0.75 / 0.95)
    assert largest_use(obs, CONFIG, Resource.EXPERTS, 64) is None
    assert measured_use(obs, CONFIG, 64) == pytest.approx(0.3)
    assert measured_use(obs, CONFIG, 48) is None
    assert measured_use(obs, CONFIG, 96) is None


@given(observations(), any_configs())
def test_load_is_a_finite_number_whatever_was_measured(obs, config):
    load = resource_load(obs, config)
    assert load is None or 0 <= load.value <= MAX_LOAD
