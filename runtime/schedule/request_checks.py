"""What makes a request impossible, whatever the load. Imports no JAX."""

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import ContextTooLong, InvalidRequest
from runtime.request import MAX_STOP_TOKEN_IDS, Request


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Known from config.json, before any weight is read; checked in the caller's thread."""

    max_context: int
    vocab_size: int

    def check(self, request: Request, eos_ids: Iterable[int]) -> None:
        """Raises InvalidRequest or ContextTooLong."""
        check_length(request, self.max_context)
        for token_id in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"prompt token ids must lie in [0, {self.vocab_size}), got {token_id}", param="prompt"
                )
        if (num_stops := len(request.params.all_stop_ids(eos_ids))) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"{num_stops} stop token ids, end-of-text ids included; at most {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )
        for token_id, _ in request.params.logit_bias:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"logit_bias token id {token_id} is not in [0, {self.vocab_size})", param="logit_bias"
                )


def check_length(request: Request, max_context: int) -> None:
    """Raises InvalidRequest for an empty prompt or no output, ContextTooLong with the numbers when both do not fit."""
    prompt_len, max_tokens = len(request.prompt_ids), request.params.max_tokens
    if prompt_len < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, at least 1 is needed", param="max_tokens")
    if prompt_len + max_tokens > max_context:
        raise ContextTooLong(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, {prompt_len + max_tokens} in all;"
            f" the context holds {max_context}",
            param="max_tokens",
        )
