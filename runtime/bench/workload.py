"""Requests to measure with: random prompts that share nothing, and prompts that share what a trace says. Imports no JAX."""

import random
from collections.abc import Sequence

from runtime.request import Request, SamplingParams

LOW_ID, HIGH_MARGIN = (
    256,
    64,
)  # byte tokens and the special tokens at the end are left out where the vocabulary allows


def random_prompts(num: int, length: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Different random id sequences; none starts like another, so no cache can help."""
    draw = random.Random(seed)
    low, high = _id_range(vocab_size)
    return [tuple(draw.randrange(low, high) for _ in range(length)) for _ in range(num)]


def block_prompt(
    block_ids: Sequence[int], block_len: int, length: int, vocab_size: int, seed: int
) -> tuple[int, ...]:
    """A prompt of `length` tokens whose blocks depend on their ids alone: equal leading ids make an equal start."""
    low, high = _id_range(vocab_size)
    tokens: list[int] = []
    for block_id in block_ids:
        draw = random.Random(f"{seed}-{block_id}")
        tokens += (draw.randrange(low, high) for _ in range(block_len))
        if len(tokens) >= length:
            break
    draw = random.Random(f"{seed}-tail-{list(block_ids)}")
    tokens += (draw.randrange(low, high) for _ in range(length - len(tokens)))
    return tuple(tokens[:length])


def greedy_request(request_id: str, prompt: tuple[int, ...], num_new: int, arrival_s: float = 0.0) -> Request:
    """Exactly num_new tokens, end-of-text ignored, so that the work is known beforehand."""
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    return Request(request_id, prompt, params, arrival_s=arrival_s)


def _id_range(vocab_size: int) -> tuple[int, int]:
    if vocab_size > 2 * (LOW_ID + HIGH_MARGIN):
        return LOW_ID, vocab_size - HIGH_MARGIN
    return 0, vocab_size
