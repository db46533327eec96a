"""Incremental text against the full decoding, whatever the tokens and the stop strings are."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.detokenizer import IncrementalDetokenizer
from runtime.engine.tokenizer import ByteTokenizer, Tokenizer
from tests.runtime.engine.small_tokenizers import TEXTS, TURN, write_byte_fallback, write_byte_level

LETTERS = st.text(st.sampled_from("ab"), max_size=60)
UNICODE = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("🦊👩🏽‍💻e\u0301好世 ")), max_size=30
)
TEXT = st.one_of(LETTERS, UNICODE, st.sampled_from(TEXTS))
STOPS = st.lists(
    st.one_of(st.text(st.sampled_from("ab"), min_size=1, max_size=5), UNICODE.filter(bool)), max_size=4
)


@pytest.fixture(scope="module", params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    write = write_byte_level if request.param == "byte_level" else write_byte_fallback
    return write(tmp_path_factory.mktemp(request.param))


def cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(TEXT, STOPS, st.booleans(), st.integers(1, 4))
def test_pieces_join_to_the_cut_text(
    tokenizer: Tokenizer, text: str, stops: list[str], include_stop: bool, step: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected, expected_stop = cut(tokenizer.decode(ids), stops, include_stop)
    detokenizer = IncrementalDetokenizer(tokenizer, stops, include_stop)
    sent, matched = "", None
    for i in range(0, len(ids), step):
        delta, matched = detokenizer.push(ids[i : i + step])
        sent += delta
        assert expected.startswith(
            sent
        )  # nothing is sent that a stop string takes back, and no half character
        if matched is not None:
            break
    sent += detokenizer.flush()
    assert sent == expected
    assert detokenizer.matched_stop == expected_stop
    if expected_stop is not None:
        before = tokenizer.decode(ids[: detokenizer.num_tokens - 1])
        assert cut(before, stops, include_stop)[1] is None or before.endswith("\ufffd")
        assert expected_stop in tokenizer.decode(ids[: detokenizer.num_tokens])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40), st.booleans())
def test_any_bytes_decode_as_a_whole(ids: list[int], skip: bool) -> None:
    """Models may emit bytes that are not UTF-8."""
    tokenizer = ByteTokenizer(512)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push((i,))[0] for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    ids = [special, *tokenizer.encode("fox", add_special_tokens=False), special]
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        sent = "".join(detokenizer.push((i,))[0] for i in ids) + detokenizer.flush()
        assert sent == tokenizer.decode(ids, skip_special_tokens=skip)


def test_characters_come_whole_and_stops_in_time() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, ["END"])
    pieces = [detokenizer.push((i,)) for i in "é, EEND".encode()]
    assert [text for text, _ in pieces] == ["", "é", ",", " ", "", "E", "", ""]
    assert pieces[-1][1] == "END"
    assert detokenizer.num_tokens == 8
    assert detokenizer.push(b"more") == ("", "END")
    assert detokenizer.num_tokens == 8
    assert detokenizer.flush() == ""


def test_tokens_behind_a_stop_in_one_push_do_not_count() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ["b", ""], include_stop=True)
    assert detokenizer.push(b"aabaa") == ("aab", "b")
    assert detokenizer.num_tokens == 3


def test_stops_wait_for_the_minimum() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ["ab"], min_tokens=4)
    assert detokenizer.push(b"ababab") == ("ab", "ab")
    assert detokenizer.num_tokens == 4


def test_a_run_without_text_stays_short(tokenizer: Tokenizer) -> None:
    """Time for each token does not grow with the run: no text, no whole character, or a stop string almost there."""
    junk = 0x80 + (3 if tokenizer.vocab_size < 400 and not tokenizer.is_byte_level else 0)
    for token_id, stop in ((tokenizer.vocab_size + 1, []), (junk, []), (97, ["a" * 1000 + "b"])):
        detokenizer = IncrementalDetokenizer(tokenizer, stop)
        start = time.process_time()
        for _ in range(5000):
            detokenizer.push((token_id,))
        assert time.process_time() - start < 2


def test_a_stop_string_may_be_a_special_token_when_shown(tmp_path: Path) -> None:
    tokenizer = write_byte_level(tmp_path)
    shown = IncrementalDetokenizer(tokenizer, [TURN], skip_special_tokens=False)
    assert shown.push(tokenizer.encode("fox" + TURN)) == ("fox", TURN)
