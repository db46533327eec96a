"""How a plan falls into the shards of an engine: which chunk is whose, what rung it needs, one packed vector a shard.

Row slot r of all shards belongs to shard r // num_slots; a chunk is computed where its row and pages are. A rung
computes an equal part on every shard, so the fullest shard decides which rung a plan needs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.ladder.batch import aligned_tokens, pack
from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan


def split_plan(plan: StepPlan, num_shards: int, num_slots: int) -> list[StepPlan]:
    """The part of each shard, with rows numbered within it; a part may be empty. num_slots: rows of one shard.

    A shard short of pages makes fewer decode steps than the others: as many as its chunks have tokens.
    """
    chunks: list[list[ScheduledChunk]] = [[] for _ in range(num_shards)]
    for chunk in plan.chunks:
        shard, row = divmod(chunk.row, num_slots)
        chunks[shard].append(replace(chunk, row=row))
    steps = [max((c.num_tokens for c in part), default=0) for part in chunks]
    return [
        replace(plan, chunks=tuple(part), num_steps=num if plan.phase is Phase.DECODE else 1)
        for part, num in zip(chunks, steps, strict=True)
    ]


def rung_size(parts: Sequence[StepPlan], page_size: int) -> tuple[int, int]:
    """(tokens, rows) that a rung must cover, over all shards: as if each were as full as the fullest."""
    is_prefill = parts[0].phase is Phase.PREFILL
    rows = max(len(part.chunks) for part in parts)
    tokens = max(aligned_tokens(part, page_size) for part in parts) if is_prefill else rows
    return tokens * len(parts), rows * len(parts)


def columns_of(plan: StepPlan, bucket: Bucket, num_shards: int, num_slots: int) -> tuple[int, ...]:
    """Where each chunk of the plan stands among the rows of the rung's output, shard after shard."""
    if num_shards == 1:
        return tuple(range(len(plan.chunks)))
    width, taken = bucket.rows // num_shards, [0] * num_shards
    columns = []
    for chunk in plan.chunks:
        shard = chunk.row // num_slots
        columns.append(shard * width + taken[shard])
        taken[shard] += 1
    return tuple(columns)


def pack_shards(
    parts: Sequence[StepPlan], bucket: Bucket, *, page_size: int, pages_per_row: int, num_slots: int
) -> np.ndarray:
    """One packed vector a shard, [shards, N]; `bucket` must cover `rung_size`."""
    share = bucket.share(len(parts))
    return np.stack(
        [
            pack(part, share, page_size=page_size, pages_per_row=pages_per_row, dummy_slot=num_slots)
            for part in parts
        ]
    )
