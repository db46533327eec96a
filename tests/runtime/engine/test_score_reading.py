"""Log probabilities reach the request and the token they belong to."""

import numpy as np

from runtime.engine.score_reading import ScoreChunk, read_logprobs, read_scores
from runtime.ladder.step import StepOutput
from runtime.model.sampling import Logprobs
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan
from runtime.schedule.sequence import Sequence


def sequence(name: str, **params) -> Sequence:
    return Sequence(Request(name, (1, 2, 3), SamplingParams(**params)))


def plan_of(*sequences: Sequence) -> StepPlan:
    chunks = tuple(
        ScheduledChunk(s, row, 0, 2, (), samples=True, is_new_row=False) for row, s in enumerate(sequences)
    )
    return StepPlan(Phase.DECODE, chunks, 2)


def output(num_steps: int = 2, num_columns: int = 4, num_top: int = 3) -> StepOutput:
    """Step k of column c: chosen -(10 k + c), alternatives 100 k + 10 c + n."""
    k, c, n = np.ogrid[:num_steps, :num_columns, :num_top]
    ids = 100 * k + 10 * c + n
    logprobs = Logprobs(-(10.0 * k + c)[..., 0], ids, -ids / 1000)
    return StepOutput(np.zeros((2, num_steps, num_columns), np.int32), logprobs)


def test_a_chunk_reads_its_own_column_and_only_what_it_asked_for():
    plan = plan_of(sequence("a"), sequence("b", logprobs=2), sequence("c", logprobs=0))
    silent, two, none = read_logprobs(plan, output(), (0, 3, 1), ((5, 6), (7, 8), (9,)))
    assert silent == ()
    assert [(t.token_id, t.logprob) for t in two] == [(7, -3.0), (8, -13.0)]
    assert [[i for i, _ in t.top] for t in two] == [[30, 31], [130, 131]]
    assert [(t.token_id, t.logprob, t.top) for t in none] == [(9, -1.0, ())]


def test_nobody_asked():
    plan = plan_of(sequence("a"), sequence("b"))
    assert read_logprobs(plan, output(), (0, 1), ((1,), (2,))) == ((), ())
    assert read_logprobs(plan_of(sequence("a", logprobs=1)), None, (0,), ((),)) == ((),)


def test_chunks_of_a_prompt_are_joined_and_rows_of_other_shards_skipped():
    one, other = sequence("one", prompt_logprobs=1), sequence("other", prompt_logprobs=2)
    rows = np.arange(6)
    outputs = (-rows.astype(float), rows[:, None] * 10 + np.arange(2), np.zeros((6, 2)))
    found = read_scores(
        (
            ScoreChunk(one, 1, np.array([11, 12]), outputs, 2),
            ScoreChunk(other, 4, np.array([21, 22]), outputs, 2, first_row=3),
            ScoreChunk(one, 3, np.array([13]), outputs, 1, first_row=5),
        )
    )
    assert [(t.token_id, t.logprob) for t in found["one"].logprobs] == [(11, 0.0), (12, -1.0), (13, -5.0)]
    assert found["one"].first == 1
    assert [(t.token_id, t.logprob) for t in found["other"].logprobs] == [(21, -3.0), (22, -4.0)]
    assert [i for i, _ in found["other"].logprobs[0].top] == [30, 31]
