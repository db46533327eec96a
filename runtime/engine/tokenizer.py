"""Text to token ids and back. `HFTokenizer` reads a model folder; `ByteTokenizer` needs none. Imports no JAX.

Both may be used from several threads at once: nothing changes after construction but what is remembered.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from runtime.engine.tokenizer_files import eos_ids, read_object, read_text, special_tokens
from runtime.errors import InvalidRequest, ModelLoadError
from runtime.request import MAX_STOP_TOKEN_IDS

MAX_TEXT_BYTES = 8 << 20


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    `is_byte_level` promises that decoding is joining `token_bytes` and reading the whole as UTF-8 with replacement.
    """

    @property
    def vocab_size(self) -> int: ...  # one more than the largest id
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def is_byte_level(self) -> bool: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class HFTokenizer:
    """A tokenizer.json with the special tokens and end-of-text ids that the files beside it name."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError when a file is missing or wrong."""
        text = read_text(folder / "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ModelLoadError(f"tokenizer.json is not valid: {str(error)[:200]}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ModelLoadError("tokenizer.json has an empty vocabulary")
        self.vocab_size = max(ids) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        named = special_tokens(folder)
        self.eos_ids = self._find_eos_ids(folder, named)
        adds_bos = read_object(folder / "tokenizer_config.json").get("add_bos_token") is True
        self._bos_id = (
            self._tokenizer.token_to_id(named["bos_token"]) if adds_bos and "bos_token" in named else None
        )
        decoders = _decoder_types(json.loads(text).get("decoder"))
        self.is_byte_level = decoders == {"ByteLevel"}
        self._has_byte_fallback = "ByteFallback" in decoders
        self._bytes_of: dict[int, bytes] = {}  # the library takes microseconds to tell them

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens that are spelled out in the text become those tokens.

        Raises InvalidRequest for text that is too long or not Unicode.
        """
        _check_text(text)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)  # asked for by add_bos_token, not done by tokenizer.json
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids that the vocabulary lacks are left out, as models pad their vocabularies."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, perhaps part of a character; nothing for an id without a token.

        All are remembered that were asked for, at most the vocabulary: grammars ask for each once, the rarest last.
        """
        found = self._bytes_of.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            found = self._bytes_of[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._has_byte_fallback:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _find_eos_ids(self, folder: Path, named: dict[str, str]) -> tuple[int, ...]:
        own = self._tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
        ids = tuple(dict.fromkeys((*eos_ids(folder), *(() if own is None else (own,)))))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ModelLoadError(
                f"the model names {len(ids)} end-of-text ids, at most {MAX_STOP_TOKEN_IDS} can be checked"
            )
        return ids


class ByteTokenizer:
    """Each byte of UTF-8 is the token of its value; 256 ends the text, 257 begins it. For tests and models without text."""

    EOS_ID, BOS_ID = 256, 257
    is_byte_level = True

    def __init__(self, vocab_size: int = 258, adds_bos: bool = False) -> None:
        if vocab_size < 258:
            raise ValueError(f"vocab_size is {vocab_size}, at least 258 are needed")
        self.vocab_size = vocab_size  # ids from 258 have no text
        self.eos_ids = (self.EOS_ID,)
        self.special_ids = frozenset((self.EOS_ID, self.BOS_ID))
        self._adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(text)
        return [self.BOS_ID] * (self._adds_bos and add_special_tokens) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b"<eos>" if token_id == self.EOS_ID else b"<bos>"
        return bytes([token_id]) if 0 <= token_id < 256 else b""


def _check_text(text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the text holds half of a surrogate pair, which is not Unicode") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidRequest(f"the text has {num_bytes} bytes, more than the limit of {MAX_TEXT_BYTES}")


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    if decoder.get("type") == "Sequence":
        return set().union(*map(_decoder_types, decoder.get("decoders", [])))
    return {str(decoder.get("type"))}


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a visible character: itself, or one from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()
