"""The experts' benchmark: what it judges, that targets hold where they did, and its command."""

import json

import numpy as np
import pytest

from runtime.bench import experts
from runtime.bench.__main__ import main
from runtime.bench.expert_pairs import pair_quality
from runtime.bench.expert_shift import replay_shift


def test_the_command_writes_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "RECORDED_SHAPES", ((8, 9),))
    monkeypatch.setattr(experts, "SYNTHETIC_SHAPES", ((32, 9), (144, 2)))
    monkeypatch.setattr(experts, "pair_quality", lambda *given: pair_quality(*given, num_layers=1))
    monkeypatch.setattr(experts, "replay_shift", lambda *given: replay_shift(*given[:5], num_steps=10))
    monkeypatch.setattr(experts, "BURSTS", (16,))
    monkeypatch.setattr(experts, "TRAFFIC_REQUESTS", 150)
    monkeypatch.setattr(experts, "TRAFFIC_SEEDS", 2)
    file, rows = tmp_path / "experts.json", tmp_path / "rows.npz"
    np.savez(rows, rows_without=np.array([[8, 0]]), rows_with=np.array([[4, 4]]))
    assert main(["experts", "--seeds", "1", "--repeats", "3", "--rows", str(rows), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    for name in (
        "imbalance_ep8_over_oracle", "imbalance_ep32", "imbalance_ep144", "same_device_duplicates",
        "after_shift_50_steps", "plan_ms",
    ):  # fmt: skip
        assert isinstance(result[name], int | float), name
    assert result["critical_path_gain"] == result["skew_engine"]["critical_path_gain"] == 2
    assert result["same_device_duplicates"] == 0
    assert result["imbalance_ep8_over_oracle"] <= 0.10
    assert 0 <= result["imbalance_ep144_pairs"]["own_loads"]["plan_above_bound"] <= 0.01
    (traffic,) = result["traffic"]
    assert (traffic["requests_in_a_row"], traffic["seeds"]) == (16, 2)
    assert 0 < traffic["predicted_with_keys"] < 1
    assert result["plan"]["same_device_duplicates_published"] > 0
    for row in result["held_out"]:  # judged as the engine forecasts: without traffic keys
        below = result["predicted_below_last_window_by"][str(row["windows_in_a_row"])]
        assert below == pytest.approx(row["last_window"] - row["predicted"], abs=1e-4)


def test_rows_of_an_engine_must_be_whole(tmp_path):
    np.savez(tmp_path / "rows.npz", rows_with=np.ones((1, 2)))
    with pytest.raises(ValueError, match="lacks rows_without"):
        experts.gain_of_rows(tmp_path / "rows.npz", 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be in [1, 1000], not 0"),
        (["--moves-per-step", "-1"], "--moves-per-step must be in"),
        (["--routing", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    assert main(["experts", *arguments]) == 2
    assert message in capsys.readouterr().err
