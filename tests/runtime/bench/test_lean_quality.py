"""The comparison of leaning: its arithmetic, and what the command refuses. Scoring runs an engine on several devices."""

import math

import numpy as np
import pytest

from runtime.bench import lean_quality
from runtime.bench.lean_quality import main, summarise


def test_figures_are_of_the_scored_tokens_and_the_busiest_devices():
    scores = [(math.log(0.5), 1), (math.log(0.125), 2)]
    rows = np.array([[[3, 1], [2, 2]], [[1, 3], [4, 0]]])  # [launches, layers, devices]
    found = summarise(scores, [1, 7], rows)
    assert found["perplexity"] == pytest.approx(4)
    assert found["other_token_first"] == 0.5
    assert found["imbalance"] == pytest.approx((0 + 0.5) / 2)  # layer 0 is even over both launches
    assert found["critical_rows"] == pytest.approx((3 + 2 + 3 + 4) / 8)


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
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "text"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
