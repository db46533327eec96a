"""Figures of one dispatch type beside another's."""

import argparse

import numpy as np
import pytest

from runtime.bench.dispatch_quality import NUM_WINDOWS, WINDOW, Scored, compare, run


def scored(logprobs: list[list[float]], best: list[list[int]], *texts: tuple[int, ...]) -> Scored:
    return Scored(np.array(logprobs), np.array(best), texts)


def test_what_is_alike_has_no_error() -> None:
    one = scored([[-1.0, -1.0]], [[4, 5]], (1, 2, 3))
    figures = compare(one, one)
    assert figures["perplexity"] == pytest.approx(np.e, abs=1e-4)
    assert (figures["mean_logprob_error"], figures["another_token_first_percent"]) == (0, 0)
    assert (figures["same_continuations"], figures["agreed_tokens"]) == (1, 3)


def test_differences_are_counted_where_they_begin() -> None:
    wide = scored([[-1.0, -1.0], [-1.0, -1.0]], [[4, 5], [6, 7]], (1, 2, 3, 4), (5, 6, 7, 8))
    found = scored([[-1.5, -1.0], [-1.0, -1.1]], [[4, 5], [6, 9]], (1, 2, 9, 4), (5, 6, 7, 8))
    figures = compare(found, wide)
    assert figures["mean_logprob_error"] == pytest.approx(0.15)
    assert figures["largest_logprob_error"] == pytest.approx(0.5)
    assert figures["another_token_first_percent"] == 25
    assert (figures["same_continuations"], figures["agreed_tokens"]) == (1, 3.0)  # two tokens, and all four


def test_a_text_that_is_too_short_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    (tmp_path / "short.txt").write_text("It was a fine morning.")
    with pytest.raises(ValueError, match=rf"short.txt has \d+ tokens, {WINDOW * NUM_WINDOWS} are needed"):
        run(argparse.Namespace(text=tmp_path / "short.txt"))
