"""Every wrong setting is refused with its name and what is allowed; nothing that would be ignored is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig, parse_config
from runtime.config_values import duration_text, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("15min", 900.0), ("1.5h", 5400.0), ("700ms", 0.7)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


def test_sizes():
    assert parse_size("80%").of(1000) == 800
    assert parse_size("2KiB").of(0) == 2048


TWO = {"expert_parallel_size": 2, "hosts": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"slo": {"tttf": "2s"}}, "nearest known key is slo.ttft"),
        ({"slo": {"ttft": 2}}, "slo.ttft: 2 is not a duration"),
        ({"kv_cache": {"kv_cache_size": "180%"}}, "not a size"),
        ({"batch_processing": {"alpha": 7}}, "batch_processing.alpha"),
        ({"parallel": {"expert_parallel_size": 0}}, "parallel.expert_parallel_size"),
        ({"parallel": {"host_id": 1}}, "host_id is 1; with parallel.hosts of 1 it is at most 0"),
        (
            {"parallel": {"hosts": 2}},
            "hosts is 2; expert_parallel_size 1 x tensor_parallel_size 1 makes 1 devices",
        ),
        ({"parallel": TWO}, "parallel.coordinator: '' is not host:port"),
        ({"parallel": TWO | {"coordinator": "::1:9800"}}, "'::1:9800' is not host:port"),
        ({"parallel": TWO | {"coordinator": "a:65535"}}, "'a:65535' is not host:port"),
        (
            {"parallel": TWO | {"coordinator": "a:9", "command_port": 9}},
            "command_port is 9, the coordinator's own",
        ),
        ({"parallel": {"host_timeout": "100ms"}}, "host_timeout"),
        ({"kv_cache": {"kv_cache_external": True}}, "kv_cache_external is True"),
        ({"server": {"max_body_size": "80%"}}, "max_body_size"),
        ({"ladder": {"decode_rows": [0]}}, "decode_rows"),
        ({"ladder": {"decode_rows": [64]}}, "max_batch_size of 32"),
    ],
)
def test_wrong_settings_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        parse_config(data)


@given(st.floats(0, 1e9, allow_nan=False))
def test_a_duration_as_text_reads_back_the_same(seconds):
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.05, "50ms"), (2.0, "2s"), (0.0, "0s"), (1_080_000.0, "1080000s")]
)
def test_a_duration_is_written_as_people_do(seconds, text):
    assert duration_text(seconds) == text


def test_a_duration_is_a_text_with_a_unit_and_never_negative():
    for wrong in (-5.0, 5.0, "-5s"):
        with pytest.raises(ValueError, match=r"slo\.itl: .* is not a duration"):
            parse_config({"slo": {"itl": wrong}})


def test_a_written_configuration_reads_back():
    assert parse_config(EngineConfig().model_dump(mode="json")) == EngineConfig()


def test_commands_go_to_the_port_beside_the_coordinators() -> None:
    parallel = parse_config({"parallel": TWO | {"coordinator": "[fd00::1]:9800"}}).parallel
    assert (parallel.coordinator_address, parallel.command_address) == (("fd00::1", 9800), ("fd00::1", 9801))
