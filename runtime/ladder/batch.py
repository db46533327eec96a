"""Packing of a StepPlan into the arrays of one rung: one int32 vector a step, so one copy to the device.

Layout of a prefill vector for T tokens, R rows and P pages a row (all int32):

    tokens [T] | row_start [R] | row_len [R] | context_len [R] | slot [R] | samples [R] | page_table [R, P]

and of a decode vector for B rows:

    num_steps [1] | warm_steps [1] | slot [B] | page_table [B, P]

warm_steps: steps that run with every row active, the dummy's too; 0 but for the warm-up of a rung.

Padding rows use the dummy slot and page 0; their row_start is T and their row_len 0.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32

from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan

DECODE_HEADER = 2  # int32 before the slots


class PrefillInputs(NamedTuple):
    tokens: Int32[Array, " T"]
    row_start: Int32[Array, " R"]
    row_len: Int32[Array, " R"]
    context_len: Int32[Array, " R"]
    slots: Int32[Array, " R"]
    samples: Int32[Array, " R"]
    page_table: Int32[Array, "R P"]


class DecodeInputs(NamedTuple):
    num_steps: Int32[Array, ""]
    warm_steps: Int32[Array, ""]
    slots: Int32[Array, " B"]
    page_table: Int32[Array, "B P"]


def packed_len(bucket: Bucket, pages_per_row: int) -> int:
    """Length of the packed vector of this rung."""
    if bucket.phase is Phase.PREFILL:
        return bucket.tokens + bucket.rows * (5 + pages_per_row)
    return DECODE_HEADER + bucket.rows * (1 + pages_per_row)


def pack(
    plan: StepPlan, bucket: Bucket, *, page_size: int, pages_per_row: int, dummy_slot: int
) -> np.ndarray:
    """The packed vector of a plan; `bucket` must cover it."""
    packed = np.zeros(packed_len(bucket, pages_per_row), np.int32)
    if bucket.phase is Phase.PREFILL:
        _pack_prefill(plan.chunks, bucket, packed, page_size, pages_per_row, dummy_slot)
    else:
        _pack_decode(plan, bucket, packed, pages_per_row, dummy_slot)
    return packed


def aligned_tokens(plan: StepPlan, page_size: int) -> int:
    """Positions that the plan's chunks take in the flat layout: each starts on a page."""
    return sum(-(-c.num_tokens // page_size) * page_size for c in plan.chunks)


def _pack_prefill(
    chunks: tuple[ScheduledChunk, ...],
    bucket: Bucket,
    packed: np.ndarray,
    page: int,
    pages_per_row: int,
    dummy: int,
) -> None:
    t, r = bucket.tokens, bucket.rows
    row_start, row_len, context_len, slots, samples = packed[t : t + 5 * r].reshape(5, r)
    table = packed[t + 5 * r :].reshape(r, pages_per_row)
    row_start[:], slots[:] = t, dummy
    offset = 0
    for i, chunk in enumerate(chunks):
        end = chunk.start + chunk.num_tokens
        packed[offset : offset + chunk.num_tokens] = chunk.sequence.token_ids(chunk.start, end)
        row_start[i], row_len[i], context_len[i] = offset, chunk.num_tokens, chunk.start
        slots[i], samples[i] = chunk.row, chunk.samples
        table[i, : len(chunk.page_ids)] = chunk.page_ids
        offset += -(-chunk.num_tokens // page) * page


def _pack_decode(plan: StepPlan, bucket: Bucket, packed: np.ndarray, pages_per_row: int, dummy: int) -> None:
    b = bucket.rows
    packed[0] = plan.num_steps
    slots = packed[DECODE_HEADER : DECODE_HEADER + b]
    table = packed[DECODE_HEADER + b :].reshape(b, pages_per_row)
    slots[:] = dummy
    for i, chunk in enumerate(plan.chunks):
        slots[i] = chunk.row
        table[i, : len(chunk.page_ids)] = chunk.page_ids


def unpack_prefill(packed: Int32[Array, " N"], bucket: Bucket, pages_per_row: int) -> PrefillInputs:
    """Inside the compiled step: views of the packed vector."""
    t, r = bucket.tokens, bucket.rows
    fields = packed[t : t + 5 * r].reshape(5, r)
    table = packed[t + 5 * r :].reshape(r, pages_per_row)
    return PrefillInputs(packed[:t], fields[0], fields[1], fields[2], fields[3], fields[4], table)


def unpack_decode(packed: Int32[Array, " N"], bucket: Bucket, pages_per_row: int) -> DecodeInputs:
    """Inside the compiled step: views of the packed vector."""
    b = bucket.rows
    rest = packed[DECODE_HEADER:]
    return DecodeInputs(packed[0], packed[1], rest[:b], rest[b:].reshape(b, pages_per_row))


def abstract_packed(bucket: Bucket, pages_per_row: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((packed_len(bucket, pages_per_row),), np.int32)
