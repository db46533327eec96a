"""The comparison of leaning: its arithmetic, which launches it judges, and what the command refuses."""

import math

import numpy as np
import pytest

from runtime.bench import lean_quality
from runtime.bench.__main__ import main
from runtime.bench.expert_skew import TOP_K, write_skewed_model
from runtime.bench.lean_quality import num_launches, score, summarise
from runtime.config import parse_config
from runtime.engine.build import load_engine
from runtime.model.architecture import load_architecture


def test_figures_are_of_the_scored_tokens_and_the_busiest_devices():
    scores = [(math.log(0.5), 1), (math.log(0.125), 2)]
    rows = np.array([[[3, 1], [2, 2]], [[1, 3], [4, 0]]])  # [launches, layers, devices]
    found = summarise(scores, [1, 7], rows)
    assert found["perplexity"] == pytest.approx(4)
    assert found["other_token_first"] == 0.5
    assert found["imbalance"] == pytest.approx((0 + 0.5) / 2)  # layer 0 is even over both launches
    assert found["critical_rows"] == pytest.approx((3 + 2 + 3 + 4) / 8)


def test_balance_is_judged_after_the_settling_tokens_not_after_as_many_chunks(tmp_path):
    """A window of 32 tokens on each of two shards, 8 tokens of each a launch: 4 launches to settle, then 4 that count."""
    write_skewed_model(tmp_path)
    config = parse_config(
        {
            "model": {"dtype": "fp32"},
            "kv_cache": {"kv_cache_size": "1MiB", "page_size": 4, "enable_prefix_cache": False},
            "ladder": {"decode_rows": [2], "prefill_tokens": [16], "cache_dir": "off"},
            "batch_processing": {"max_batch_size": 2, "base_batch_size": 2},
            "parallel": {"expert_parallel_size": 2, "exchange": "gather", "micro_batch_overlap": "off"},
        }
    )
    loaded = load_engine(config, tmp_path, load_architecture(tmp_path), (), 48)
    windows = [tuple(range(32 * i, 32 * i + 32)) for i in range(4)]
    scores, rows = score(loaded, windows, 2, 0.0, 2)
    assert len(scores) == 2 * 31
    assert len(rows) == 4
    assert (rows.sum(axis=(0, 2)) == 2 * 32 * TOP_K).all()  # of these windows alone


@pytest.mark.parametrize(("needed", "launches"), [(0, 0), (1, 1), (3, 1), (4, 3), (10, 4)])
def test_launches_are_counted_by_tokens(needed, launches):
    assert num_launches([3, 0, 5, 2], needed) == launches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strengths", "0.1,much"], "must be numbers with commas between"),
        (["--strengths", "0.6"], "in [0, 0.5]"),
        (["--strengths", "nan"], "in [0, 0.5]"),
        ([], "tokens, 32768 are needed"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(lean_quality, "compare", lambda *_: pytest.fail("scored"))
    (tmp_path / "text").write_text("short", encoding="utf-8")
    assert main(["lean", "--text", str(tmp_path / "text"), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
