"""Log probabilities as the host reads them: of the tokens that a launch chose, and of the prompts that it computed."""

from dataclasses import dataclass

import jax
import numpy as np

from runtime.ladder.step import StepOutput
from runtime.request import TokenLogprob
from runtime.schedule.plan import StepPlan
from runtime.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScoreChunk:
    """Prompt log probabilities in flight: `num` targets of one sequence, first target at position `first`."""

    sequence: Sequence
    first: int
    targets: np.ndarray
    outputs: tuple[jax.Array, jax.Array, jax.Array]
    num: int
    first_row: int = 0  # of the outputs; others belong to other shards


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of consecutive prompt tokens, the first of them at position `first`."""

    first: int
    logprobs: tuple[TokenLogprob, ...]


def read_logprobs(
    plan: StepPlan, output: StepOutput | None, columns: tuple[int, ...], tokens: tuple[tuple[int, ...], ...]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """By chunk of the plan, empty where nobody asked. columns: each chunk's place among the output's rows."""
    wanted = [c.sequence.request.params.logprobs for c in plan.chunks]
    if output is None or all(w is None for w in wanted):
        return tuple(() for _ in wanted)
    chosen, top_ids, top = (np.asarray(a) for a in output.logprobs)
    return tuple(
        ()
        if num is None
        else tuple(
            _token_logprob(token, chosen[k, column], top_ids[k, column, :num], top[k, column, :num])
            for k, token in enumerate(tokens[i])
        )
        for i, (num, column) in enumerate(zip(wanted, columns, strict=True))
    )


def read_scores(scores: tuple[ScoreChunk, ...]) -> dict[str, PromptScores]:
    """By request: the chunks of a prompt come one after another."""
    read: dict[str, PromptScores] = {}
    for score in scores:
        num_top, at = score.sequence.request.params.prompt_logprobs or 0, score.first_row
        chosen, top_ids, top = (np.asarray(a) for a in score.outputs)
        news = tuple(
            _token_logprob(int(score.targets[i - at]), chosen[i], top_ids[i, :num_top], top[i, :num_top])
            for i in range(at, at + score.num)
        )
        before = read.get(score.sequence.request_id, PromptScores(score.first, ()))
        read[score.sequence.request_id] = PromptScores(before.first, before.logprobs + news)
    return read


def _token_logprob(token: int, chosen: np.floating, top_ids: np.ndarray, top: np.ndarray) -> TokenLogprob:
    pairs = tuple((int(i), float(p)) for i, p in zip(top_ids, top, strict=True))
    return TokenLogprob(token, float(chosen), pairs)
