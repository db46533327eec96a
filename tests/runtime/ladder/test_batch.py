"""Packed vectors hold exactly the plan, and padding points at the dummy page and slot."""

import numpy as np

from runtime.ladder.batch import aligned_tokens, pack, unpack_decode, unpack_prefill
from runtime.ladder.bucket import decode_bucket, prefill_bucket
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan
from runtime.schedule.sequence import Sequence

SHAPE = {"page_size": 4, "pages_per_row": 3, "dummy_slot": 9}


def chunk(prompt, start, num, row, pages, samples=True) -> ScheduledChunk:
    sequence = Sequence(Request("r", tuple(prompt), SamplingParams()))
    return ScheduledChunk(sequence, row, start, num, tuple(pages), samples, False)


def test_prefill_vector():
    plan = StepPlan(
        Phase.PREFILL,
        (chunk(range(10, 20), 4, 6, 2, [5, 6, 7]), chunk([31, 32, 33], 0, 3, 0, [8])),
    )
    assert aligned_tokens(plan, 4) == 12
    bucket = prefill_bucket(16, 4, 3)
    inputs = unpack_prefill(pack(plan, bucket, **SHAPE), bucket, 3)
    assert inputs.tokens.tolist() == [14, 15, 16, 17, 18, 19, 0, 0, 31, 32, 33, 0, 0, 0, 0, 0]
    assert inputs.row_start.tolist() == [0, 8, 16]
    assert inputs.row_len.tolist() == [6, 3, 0]
    assert inputs.context_len.tolist() == [4, 0, 0]
    assert inputs.slots.tolist() == [2, 0, 9]
    assert inputs.samples.tolist() == [1, 1, 0]
    assert inputs.page_table.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]


def test_prefill_after_preemption_takes_outputs_too():
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams()), output_ids=[7, 8])
    plan = StepPlan(Phase.PREFILL, (ScheduledChunk(sequence, 0, 0, 5, (1, 2), True, True),))
    bucket = prefill_bucket(8, 4, 1)
    assert unpack_prefill(pack(plan, bucket, **SHAPE), bucket, 3).tokens.tolist() == [1, 2, 3, 7, 8, 0, 0, 0]


def test_decode_vector():
    plan = StepPlan(Phase.DECODE, (chunk([1], 1, 1, 4, [3]), chunk([1], 1, 1, 0, [2, 6])), num_steps=5)
    bucket = decode_bucket(3)
    packed = pack(plan, bucket, **SHAPE)
    assert packed.dtype == np.int32
    inputs = unpack_decode(packed, bucket, 3)
    assert int(inputs.num_steps) == 5
    assert inputs.slots.tolist() == [4, 0, 9]
    assert inputs.page_table.tolist() == [[3, 0, 0], [2, 6, 0], [0, 0, 0]]
