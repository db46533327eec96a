"""What makes a request impossible, whatever the load. Imports no JAX."""

from runtime.errors import ContextTooLong, InvalidRequest
from runtime.request import Request


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
