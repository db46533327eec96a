"""Forecasts with and without traffic keys, through the real scheduler."""

from runtime.bench.expert_loads import read_recorded
from runtime.bench.expert_traffic import replay_traffic


def test_keys_tell_a_change_of_task_before_it_comes() -> None:
    found = replay_traffic(read_recorded(None), 8, 9, burst=16, num_requests=500)
    assert found["judged_windows"] > 20
    assert found["predicted_with_keys"] < 0.8 * min(found["predicted"], found["last_window"])
