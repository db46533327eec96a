"""The micro-batch follows free memory, and length divides."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.adaptive.choice import Reason
from runtime.adaptive.micro_batch import decide_micro_batch
from tests.runtime.adaptive.observations import NOW_S, any_configs, make_config, observations, observe

MIB = 1 << 20


def decide(previous=7, config=None, **fields):
    fields = {"free_bytes": 10 * MIB, "bytes_per_token": 1024, "expected_len": 1024.0, **fields}
    choice = decide_micro_batch(previous, observe(**fields), config or make_config(), NOW_S)
    return choice.value, choice.reason


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (10, Reason.MEMORY)),  # 10 MiB / (1 KiB * 1024)
        ({"expected_len": 2048.0}, (5, Reason.MEMORY)),  # twice as long: half as many
        ({"free_bytes": 1 << 40}, (32, Reason.AT_MAX)),
        ({"free_bytes": 1000}, (1, Reason.AT_MIN)),
        ({"free_bytes": 0}, (1, Reason.AT_MIN)),
        ({"expected_len": None}, (16, Reason.MISSING_DATA)),
        ({"expected_len": math.nan}, (16, Reason.MISSING_DATA)),
        ({"bytes_per_token": 0}, (16, Reason.MISSING_DATA)),
        ({"time_s": NOW_S - 3}, (7, Reason.STALE)),
    ],
)
def test_what_is_decided(fields, expected):
    assert decide(**fields) == expected


def test_off_and_bounds_come_from_config():
    assert decide(config=make_config(enable_dynamic_batch=False)) == (16, Reason.FIXED)
    assert decide(config=make_config(max_micro_batch_size=4)) == (4, Reason.AT_MAX)
    assert decide(expected_len=None, config=make_config(micro_batch_size=3)) == (3, Reason.MISSING_DATA)
    small = make_config(micro_batch_size=30, max_micro_batch_size=4)
    assert decide(expected_len=None, config=small) == (4, Reason.MISSING_DATA)


@given(st.integers(1, 1 << 16), observations(), any_configs())
def test_bounds_hold(previous, obs, config):
    choice = decide_micro_batch(previous, obs, config, NOW_S)
    assert 1 <= choice.value <= config.batch_processing.max_micro_batch_size


@given(observations(), st.integers(0, 1 << 40), st.floats(1, 1e5), st.floats(1, 1e5))
def test_longer_requests_never_give_a_larger_micro_batch(obs, free_bytes, one, other):
    short, long = sorted((one, other))
    config = make_config()
    sizes = [
        decide(
            free_bytes=free_bytes, bytes_per_token=obs.bytes_per_token or 1, expected_len=n, config=config
        )[0]
        for n in (short, long)
    ]
    assert sizes[0] >= sizes[1]
