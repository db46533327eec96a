"""The comparison of dispatch types: its arithmetic and what it refuses. The scoring itself runs an engine on four devices."""

import math

import pytest

from runtime.bench import dispatch_quality


@pytest.fixture(autouse=True)
def flags_of_before(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")


def run(monkeypatch, path) -> int:
    monkeypatch.setattr("sys.argv", ["dispatch_quality", str(path)])
    return dispatch_quality.main()


def test_perplexity_is_per_token_and_other_tokens_are_told_against_the_model_type(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "text").write_text("a word and another. " * 1000, encoding="utf-8")
    scores = {
        "model": [(math.log(0.5), 1), (math.log(0.125), 2)],
        "fp8": [(math.log(0.25), 1), (math.log(0.25), 3)],
    }
    monkeypatch.setattr(dispatch_quality, "score", lambda tokens, dtype: scores[dtype])
    assert run(monkeypatch, tmp_path / "text") == 0
    model, fp8 = capsys.readouterr().out.splitlines()
    assert "perplexity 4.0000" in model
    assert "0.00 % of 2" in model
    assert "perplexity 4.0000" in fp8
    assert "50.00 % of 2" in fp8


def test_too_short_a_text_is_refused_before_anything_is_scored(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("short", encoding="utf-8")
    monkeypatch.setattr(dispatch_quality, "score", lambda *_: pytest.fail("scored"))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path / "text")
    assert ended.value.code == 2
    assert "2048 are needed" in capsys.readouterr().err
