"""IncrementalDetokenizer: tokens of one request in, text out that is safe to send. Imports no JAX.

Two things are held back: bytes that do not make a whole character yet, and text that may turn out to begin a stop
string. Work for each token does not grow with the text. The joined pieces equal the decoding of all tokens, cut at
the stop string that is complete first (of those that end together, the longest).
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from runtime.engine.tokenizer import Tokenizer

MAX_UNDECODED = 16  # tokens that may wait for a whole character; longer runs are not text


class IncrementalDetokenizer:
    """`push` tokens as they come, `flush` when no more will. Owned by one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings count only once `min_tokens` tokens were pushed."""
        decoder = _ByteDecoder if tokenizer.is_byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokenizer, skip_special_tokens)
        self._matchers = [_StopMatcher(text) for text in stop if text]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = (
            ""  # decoded, not given out: the longest beginning of a stop string at the end of the text
        )
        self.num_tokens = 0  # tokens used: with a match, up to the one that completed it
        self.matched_stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """(text that may be sent now, the stop string that is now complete). Tokens behind a match are ignored."""
        if not self._matchers:
            self.num_tokens += len(token_ids)
            return self._decoder.push_all(token_ids), None
        text = ""
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            text += self._release(self._decoder.push(token_id))
        return text, self.matched_stop

    def flush(self) -> str:
        """What was held back; nothing after a match."""
        if self.matched_stop is not None:
            return ""
        text = self._release(self._decoder.flush())
        if self.matched_stop is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new_text: str) -> str:
        if not self._matchers:
            return new_text
        text = self._held + new_text
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = [m.stop for m in self._matchers if m.push(text[end - 1])]
            if complete and self.num_tokens >= self._min_tokens:
                self.matched_stop = max(complete, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.matched_stop)]
        num_safe = len(text) - max(m.num_matched for m in self._matchers)
        self._held = text[num_safe:]
        return text[:num_safe]


class _StopMatcher:
    """Knuth, Morris and Pratt: how many characters at the end of the text begin the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # less than len(stop)
        self._shorter = [0] * (
            len(stop) + 1
        )  # [n]: next best if the first n characters match and the next does not
        for i in range(1, len(stop)):
            self._shorter[i + 1] = self._advance(self._shorter[i], stop[i])

    def push(self, char: str) -> bool:
        """Whether the stop string ends with this character."""
        self.num_matched = self._advance(self.num_matched, char)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._shorter[self.num_matched]
        return True

    def _advance(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._shorter[num_matched]
        return num_matched + (self.stop[num_matched] == char)


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def push_all(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """For byte-level tokenizers: bytes straight into an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(
            b"".join([self._token_bytes(t) for t in token_ids if t not in self._skipped])
        )

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For the others, whose text of a token depends on its neighbours: decode a few tokens, take what is new.

    The window is [tokens whose text was given out last][tokens without text so far].
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens)
        self._window: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        if len(self._window) - self._num_given < MAX_UNDECODED and (not text or text.endswith("\ufffd")):
            return ""
        return self._give(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._give(self._new_text())

    def _new_text(self) -> str:
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(given) :]

    def _give(self, text: str) -> str:
        if text:
            del self._window[: self._num_given]
        else:
            del self._window[self._num_given :]
        self._num_given = len(self._window)
        return text
