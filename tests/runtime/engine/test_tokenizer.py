"""Tokenizers of two kinds read from a folder, their special ids, and files that must be refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import tokenizer as tokenizer_module
from runtime.engine.tokenizer import ByteTokenizer, HFTokenizer
from runtime.errors import InvalidRequest, ModelLoadError
from tests.runtime.engine.small_tokenizers import END, TEXTS, TURN, write_byte_fallback, write_byte_level

VALID = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@settings(max_examples=50, deadline=None)
@given(VALID)
def test_round_trip(byte_level: HFTokenizer, text: str) -> None:
    for tokenizer in (byte_level, ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 450)), st.booleans())
def test_byte_level_decoding_is_joining_bytes(byte_level: HFTokenizer, ids: list[int], skip: bool) -> None:
    kept = [i for i in ids if not (skip and i in byte_level.special_ids)]
    joined = b"".join(map(byte_level.token_bytes, kept)).decode(errors="replace")
    assert byte_level.decode(ids, skip_special_tokens=skip) == joined


def test_special_tokens(byte_level: HFTokenizer) -> None:
    end, turn = byte_level.encode(END)[0], byte_level.encode(TURN)[0]
    assert byte_level.special_ids == {end, turn}
    assert byte_level.eos_ids == (end,)
    assert byte_level.token_bytes(turn) == TURN.encode()
    assert byte_level.decode([turn, *byte_level.encode("fox")]) == "fox"
    assert byte_level.decode([turn], skip_special_tokens=False) == TURN
    assert byte_level.token_bytes(byte_level.vocab_size) == byte_level.token_bytes(-1) == b""
    assert byte_level.decode([byte_level.vocab_size + 5, -3]) == ""


def test_bytes_are_looked_up_once_by_id_and_only_those_of_the_vocabulary_are_kept(
    tmp_path: Path, monkeypatch
) -> None:
    tokenizer, looked_up = write_byte_level(tmp_path), []
    find = tokenizer._find_bytes
    monkeypatch.setattr(tokenizer, "_find_bytes", lambda i: looked_up.append(i) or find(i))
    every = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]  # as grammars do
    assert (
        every
        == [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        == [find(i) for i in range(tokenizer.vocab_size)]
    )
    assert {tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size, 1 << 40)} == {b""}
    assert looked_up == list(range(tokenizer.vocab_size))
    assert len(tokenizer._bytes_of) == tokenizer.vocab_size


def test_end_of_text_ids_come_from_three_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    tokenizer = write_byte_level(tmp_path, eos_token={"content": TURN, "special": True})
    assert tokenizer.eos_ids == (7, 8, 1)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": list(range(20))}))
    with pytest.raises(ModelLoadError, match="end-of-text ids"):
        HFTokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": True}))
    with pytest.raises(ModelLoadError, match="no token id"):
        HFTokenizer(tmp_path)


def test_bos_is_added_once_when_asked_for(tmp_path: Path) -> None:
    tokenizer = write_byte_fallback(tmp_path, bos_token="<s>", add_bos_token=True)
    bos = 1
    assert tokenizer.encode("fox")[0] == bos
    assert bos not in tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("<s>fox").count(bos) == 1
    assert ByteTokenizer(adds_bos=True).encode("a") == [257, 97]


def test_byte_fallback_pieces(tmp_path: Path) -> None:
    tokenizer = write_byte_fallback(tmp_path)
    ids = tokenizer.encode("The fox 好")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" The", b" fox", b" ", b"\xe5", b"\xa5", b"\xbd"]
    assert tokenizer.decode(ids) == "The fox 好"
    assert not tokenizer.is_byte_level


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 1}', '{"version": "1.0"}'])
def test_bad_files_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_bad_neighbours_are_refused(tmp_path: Path, content: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        HFTokenizer(tmp_path)


def test_text_is_bounded(byte_level: HFTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud800")
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 8)
    with pytest.raises(InvalidRequest, match="9 bytes, more than the limit of 8"):
        byte_level.encode("好好好")


def test_threads_may_share_it(byte_level: HFTokenizer) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert (
            list(pool.map(lambda text: byte_level.decode(byte_level.encode(text)), TEXTS * 20)) == TEXTS * 20
        )
