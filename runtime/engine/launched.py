"""InFlightStep and CollectedStep: a launch before and after its tokens are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from runtime.adaptive.form_judge import Turn
from runtime.engine.score_reading import PromptScores, ScoreChunk
from runtime.experts.layer import ExpertLoad
from runtime.ladder.bucket import Bucket
from runtime.ladder.step import StepOutput
from runtime.request import TokenLogprob
from runtime.schedule.plan import StepPlan, StepResult

NO_ROWS = np.zeros((0, 0), np.int32)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launch whose tokens have not been read."""

    plan: StepPlan
    bucket: Bucket
    output: StepOutput | None  # None: no chunk of the prefill ends, nothing is sampled
    scores: tuple[ScoreChunk, ...]
    load: ExpertLoad  # of this launch alone
    launched_s: float
    columns: tuple[int, ...] = ()  # place of each chunk among the output's rows
    size: int = 0  # tokens that its rung had to cover
    turn: Turn | None = None  # which form of the rung, where it has two

    @property
    def expert_tokens(self) -> jax.Array:
        """Tokens by layer and logical expert, [L, E]."""
        return self.load.tokens


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """What the host read of a launch: tokens and, where asked for, log probabilities by chunk of the plan."""

    result: StepResult
    num_steps: int  # decode steps that ran, 1 in prefill
    expert_tokens: np.ndarray  # [L, E]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: Mapping[str, PromptScores] = field(default_factory=dict)
    device_rows: np.ndarray = field(
        default_factory=lambda: NO_ROWS
    )  # [L, devices], experts' rows where there are several devices
    asleep: np.ndarray | None = None  # [L, AsleepColumn], where experts may sleep


def read_tokens(output: np.ndarray, columns: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """`StepOutput.tokens`, [2, K, B], to (the tokens of each of these columns, steps that ran).

    By lists: each operation on an array costs as much as all of this.
    """
    ids, produced = output.tolist()
    num_steps = sum(map(any, produced))
    tokens = (tuple(ids[k][i] for k in range(num_steps) if produced[k][i]) for i in columns)
    return tuple(tokens), num_steps
