"""The pure functions that get compiled: prefill, sample, decode, score, and the small writes of row state.

What may change without a compile is an argument; what is allowed to force one is a field of the Bucket or of
StepShape. Arrays that are replaced each step (pool, row state, sampling state, hidden) are donated by the compiler.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from runtime.cache.kv_pool import KVPool
from runtime.experts.layer import ExpertLoad, no_load
from runtime.ladder.batch import unpack_decode, unpack_prefill
from runtime.ladder.bucket import Bucket
from runtime.model.architecture import Architecture
from runtime.model.params import Params, has_store
from runtime.model.sampling import Logprobs, SamplingState, sample, score
from runtime.model.sharding import ALONE, LayerSharding
from runtime.model.transformer import DecodeBatch, PrefillBatch, forward_decode, forward_prefill, unembed
from runtime.request import MAX_TOP_LOGPROBS

MAX_DECODE_STEPS = 16  # length of a launch's output; the number of steps run is data
SCORE_CHUNK = 64  # prompt positions scored by one call


@dataclass(frozen=True, slots=True)
class StepShape:
    """What all rungs share: row slots (the last is the dummy), page size, pages of a row, widest prefill."""

    num_slots: int
    page_size: int
    pages_per_row: int
    max_prefill_tokens: int

    @property
    def dummy_slot(self) -> int:
        return self.num_slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """Progress of each row slot (S slots and the dummy), kept on the device so that a launch needs no token read.

    token, position: the next input token and its index; budget: outputs still allowed; is_done: met a stop id.
    """

    token: Int32[Array, " S1"]
    position: Int32[Array, " S1"]
    budget: Int32[Array, " S1"]
    is_done: Bool[Array, " S1"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads of one launch. `tokens[0]` are ids, `tokens[1]` is 1 where a token was produced."""

    tokens: Int32[Array, "2 K B"]
    logprobs: Logprobs  # chosen [K, B], top_ids and top_values [K, B, n]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillOutput:
    """Logits of the last position of each row, and what the sampler needs to know about the rows."""

    logits: Float[Array, "R V"]
    slots: Int32[Array, " R"]
    samples: Bool[Array, " R"]
    end: Int32[Array, " R"]


def abstract_row_state(shape: StepShape) -> RowState:
    slots = shape.num_slots + 1
    ints, flags = jax.ShapeDtypeStruct((slots,), jnp.int32), jax.ShapeDtypeStruct((slots,), jnp.bool_)
    leaves: list[Any] = [ints, ints, ints, flags]
    return RowState(*leaves)


def prefill_step(
    arch: Architecture,
    shape: StepShape,
    bucket: Bucket,
    params: Params,
    pool: KVPool,
    hidden_out: Float[Array, "Tmax D"],
    packed: Int32[Array, " N"],
    *,
    sharding: LayerSharding = ALONE,
) -> tuple[KVPool, Float[Array, "Tmax D"], PrefillOutput, ExpertLoad]:
    """Compute one flat batch of chunks; `hidden_out` keeps the last hidden states for `score_step`.

    The last result says what the layers asked of the experts.
    """
    inputs = unpack_prefill(packed, bucket, shape.pages_per_row)
    batch = PrefillBatch(
        inputs.tokens, inputs.row_start, inputs.row_len, inputs.context_len, inputs.page_table
    )
    hidden, pool, load = forward_prefill(
        arch, params, pool, batch, page_size=shape.page_size, sharding=sharding
    )
    last = jnp.clip(inputs.row_start + inputs.row_len - 1, 0, bucket.tokens - 1)
    with jax.named_scope("unembed"):
        logits = unembed(arch, params, hidden[last])
    hidden_out = lax.dynamic_update_slice(hidden_out, hidden.astype(hidden_out.dtype), (0, 0))
    end = inputs.context_len + inputs.row_len
    return pool, hidden_out, PrefillOutput(logits, inputs.slots, inputs.samples == 1, end), load


def sample_step(
    shape: StepShape, rows: RowState, sampling: SamplingState, prefilled: PrefillOutput
) -> tuple[RowState, SamplingState, StepOutput]:
    """Sample the first token of each row whose prefill ended."""
    slots = jnp.where(prefilled.samples, prefilled.slots, shape.dummy_slot)
    tokens, hit_stop, logprobs, sampling = sample(sampling, slots, prefilled.logits, prefilled.samples)
    rows = RowState(
        token=rows.token.at[slots].set(tokens),
        position=rows.position.at[slots].set(prefilled.end),
        budget=rows.budget.at[slots].add(-1),
        is_done=rows.is_done.at[slots].set(hit_stop),
    )
    pair = jnp.stack([tokens, prefilled.samples.astype(jnp.int32)])[:, None, :]
    return rows, sampling, StepOutput(pair, jax.tree.map(lambda a: a[None], logprobs))


def decode_step(
    arch: Architecture,
    shape: StepShape,
    bucket: Bucket,
    params: Params,
    pool: KVPool,
    rows: RowState,
    sampling: SamplingState,
    packed: Int32[Array, " N"],
    *,
    sharding: LayerSharding = ALONE,
) -> tuple[KVPool, RowState, SamplingState, StepOutput, ExpertLoad]:
    """Up to num_steps decode steps: the count is data, and the loop ends early when no row is active.

    A warm-up runs its steps with every row active, on the dummy slot and page, so that all code is touched. Devices
    that share the experts make as many steps as the one with the most.

    The last result says what the layers asked of the experts.
    """
    inputs = unpack_decode(packed, bucket, shape.pages_per_row)
    slots, b = inputs.slots, bucket.rows

    def active_rows(rows: RowState) -> Bool[Array, " B"]:
        is_active = ~rows.is_done[slots] & (rows.budget[slots] > 0) & (slots != shape.dummy_slot)
        return is_active | (inputs.warm_steps > 0)

    def goes_on(step: Int32[Array, ""], rows: RowState) -> Bool[Array, ""]:
        mine = (step < inputs.num_steps + inputs.warm_steps) & jnp.any(active_rows(rows))
        return sharding.any_device(mine)

    def body(carry):
        step, _, pool, rows, sampling, out, loads = carry
        # Tied to the step, so that the compiler does not move work on whole weights (conversions, layouts) out of
        # the loop: it would read and write every weight once a launch and keep the copies.
        weights, step = lax.optimization_barrier((params, step))
        active = active_rows(rows)
        if sharding.exchange is not None:  # this device may be done while others are not
            active &= step < inputs.num_steps + inputs.warm_steps
        batch = DecodeBatch(rows.token[slots], rows.position[slots], active, inputs.page_table)
        hidden, pool, load = forward_decode(
            arch, weights, pool, batch, page_size=shape.page_size, sharding=sharding
        )
        with jax.named_scope("unembed"):
            logits = unembed(arch, weights, hidden)
        with jax.named_scope("sample"):
            tokens, hit_stop, logprobs, sampling = sample(sampling, slots, logits, active)
        rows = _advance(rows, slots, tokens, hit_stop, active)
        pair = jnp.stack([tokens, active.astype(jnp.int32)])
        out = StepOutput(
            tokens=lax.dynamic_update_slice(out.tokens, pair[:, None, :], (0, step, 0)),
            logprobs=jax.tree.map(lambda a, new: a.at[step].set(new), out.logprobs, logprobs),
        )
        loads = jax.tree.map(jnp.add, loads, load)
        return step + 1, goes_on(step + 1, rows), pool, rows, sampling, out, loads

    out = StepOutput(
        tokens=jnp.zeros((2, MAX_DECODE_STEPS, b), jnp.int32),
        logprobs=Logprobs(
            jnp.zeros((MAX_DECODE_STEPS, b), jnp.float32),
            jnp.zeros((MAX_DECODE_STEPS, b, MAX_TOP_LOGPROBS), jnp.int32),
            jnp.zeros((MAX_DECODE_STEPS, b, MAX_TOP_LOGPROBS), jnp.float32),
        ),
    )
    loads = no_load(max(1, arch.num_experts), arch.num_layers, has_store=has_store(params))
    carry = (jnp.int32(0), goes_on(jnp.int32(0), rows), pool, rows, sampling, out, loads)
    _, _, pool, rows, sampling, out, loads = lax.while_loop(lambda carry: carry[1], body, carry)
    return pool, rows, sampling, out, loads


def score_step(
    arch: Architecture,
    params: Params,
    hidden: Float[Array, "Tmax D"],
    offset: Int32[Array, ""],
    targets: Int32[Array, " C"],
) -> tuple[Float[Array, " C"], Int32[Array, "C n"], Float[Array, "C n"]]:
    """Log probabilities of `targets` after the SCORE_CHUNK positions from `offset` of the last prefill."""
    chunk = lax.dynamic_slice_in_dim(hidden, offset, targets.shape[0])
    return score(unembed(arch, params, chunk), targets)


def start_row(rows: RowState, slot: Int32[Array, ""], budget: Int32[Array, ""]) -> RowState:
    """Hand the slot to a new sequence that may still produce `budget` tokens."""
    return RowState(
        token=rows.token.at[slot].set(0),
        position=rows.position.at[slot].set(0),
        budget=rows.budget.at[slot].set(budget),
        is_done=rows.is_done.at[slot].set(False),
    )


def _advance(
    rows: RowState,
    slots: Int32[Array, " B"],
    tokens: Int32[Array, " B"],
    hit_stop: Bool[Array, " B"],
    active: Bool[Array, " B"],
) -> RowState:
    """Rows that were active move one token on; the others stay as they are."""
    step = active.astype(jnp.int32)
    return RowState(
        token=rows.token.at[slots].set(jnp.where(active, tokens, rows.token[slots])),
        position=rows.position.at[slots].add(step),
        budget=rows.budget.at[slots].add(-step),
        is_done=rows.is_done.at[slots].set(rows.is_done[slots] | (active & hit_stop)),
    )
