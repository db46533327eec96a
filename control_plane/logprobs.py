"""Log probabilities in OpenAI's two forms. Values are finite and at most 0, bytes are always given."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from control_plane.engine_handle import Tokenizer
from runtime.request import TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for entry in entries:
        top = [_chat_entry(tokenizer, token, value) for token, value in entry.top[:num_top]]
        content.append(_chat_entry(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds `choices[].logprobs` of one plain completion piece by piece; offsets go on over pieces."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def piece(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            data = self._tokenizer.token_bytes(entry.token_id)
            tokens.append(completion_token(data))
            values.append(None if entry.logprob is None else finite(entry.logprob))
            tops.append(self._top(entry, tokens[-1]))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob, token: str) -> dict[str, float] | None:
        """The best tokens and always the chosen one, as OpenAI does; None for a prompt's first token."""
        if entry.logprob is None:
            return None
        best = {
            completion_token(self._tokenizer.token_bytes(token_id)): finite(value)
            for token_id, value in entry.top[: self._num_top]
        }
        return best | {token: finite(entry.logprob)}


def completion_token(data: bytes) -> str:
    r"""A token as a key: its text, or `bytes:\xe2\x80` for a part of a character, so that keys stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(value: float) -> float:
    return min(0.0, max(MIN_LOGPROB, value)) if not math.isnan(value) else MIN_LOGPROB


def _chat_entry(tokenizer: Tokenizer, token_id: int, value: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(value or 0.0), "bytes": list(data)}
