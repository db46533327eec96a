"""Picking tokens on the device: the state of each row slot, and `sample`, which runs inside the compiled step.

The order is vLLM's: grammar mask, minimum length, bias, penalties, then greedy choice or temperature, min-p, top-k
and top-p. Log probabilities are those of the model, before all of that. A row's draw depends on its seed and on how
many tokens it has generated, never on its neighbours or the number of rows.

The state has one slot more than there are rows; padding rows of a step use that last slot. Work that no active row
asks for is skipped at run time, so an all-greedy batch costs one argmax.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, UInt32

from runtime.errors import InvalidRequest
from runtime.model.draw import draw_tokens
from runtime.request import MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams

NO_TOKEN_ID = 2**31 - 1  # fills unused places of stop_ids; no vocabulary has this id
MASK_BITS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """What `sample` knows of each slot. S row slots and one for padding; V tokens; W = ceil(V / 32).

    The last block is dense: read only for slots with `uses_dense` (bias and penalties) or `has_mask` (grammar).
    """

    temperature: Float[Array, " S1"]  # 0: greedy
    top_k: Int[Array, " S1"]  # 0: no limit
    top_p: Float[Array, " S1"]
    min_p: Float[Array, " S1"]
    presence: Float[Array, " S1"]
    frequency: Float[Array, " S1"]
    repetition: Float[Array, " S1"]
    seed: UInt32[Array, " S1"]
    num_generated: Int[Array, " S1"]
    min_tokens: Int[Array, " S1"]
    stop_ids: Int[Array, "S1 {MAX_STOP_TOKEN_IDS}"]  # unused places hold NO_TOKEN_ID
    wants_logprobs: Bool[Array, " S1"]
    num_top_logprobs: Int[Array, " S1"]  # alternatives wanted besides the chosen token
    uses_dense: Bool[Array, " S1"]
    has_mask: Bool[Array, " S1"]
    bias: Float[Array, "S1 V"]
    prompt_seen: Bool[Array, "S1 V"]
    output_counts: Int[Array, "S1 V"]
    mask: Int[Array, "S1 W"]  # bit t % 32 of word t // 32: token t is allowed


class Logprobs(NamedTuple):
    """Log probabilities of the model's own distribution; zeros where no active row of the batch asked."""

    chosen: Float[Array, " B"]
    top_ids: Int[Array, "B {MAX_TOP_LOGPROBS}"]  # best first
    top_values: Float[Array, "B {MAX_TOP_LOGPROBS}"]


class RowRecord(NamedTuple):
    """One request's scalars in two small arrays; stack records along axis 0 to write several slots at once."""

    floats: np.ndarray | Array  # f32 [*n, 6]: temperature, top_p, min_p, presence, frequency, repetition
    ints: np.ndarray | Array  # i32 [*n, 14]: top_k, seed, num_generated, min_tokens, wants, num_top, stop ids


def make_sampling_state(num_rows: int, vocab_size: int) -> SamplingState:
    """State of `num_rows` idle slots, all greedy, and the padding slot behind them."""
    slots = num_rows + 1
    words = -(-vocab_size // MASK_BITS)

    def fill(value: float, dtype: DTypeLike, *shape: int) -> Array:
        return jnp.full((slots, *shape), value, dtype)

    return SamplingState(
        temperature=fill(0, jnp.float32),
        top_k=fill(0, jnp.int32),
        top_p=fill(1, jnp.float32),
        min_p=fill(0, jnp.float32),
        presence=fill(0, jnp.float32),
        frequency=fill(0, jnp.float32),
        repetition=fill(1, jnp.float32),
        seed=fill(0, jnp.uint32),
        num_generated=fill(0, jnp.int32),
        min_tokens=fill(0, jnp.int32),
        stop_ids=fill(NO_TOKEN_ID, jnp.int32, MAX_STOP_TOKEN_IDS),
        wants_logprobs=fill(False, jnp.bool_),
        num_top_logprobs=fill(0, jnp.int32),
        uses_dense=fill(False, jnp.bool_),
        has_mask=fill(False, jnp.bool_),
        bias=fill(0, jnp.float32, vocab_size),
        prompt_seen=fill(False, jnp.bool_, vocab_size),
        output_counts=fill(0, jnp.int32, vocab_size),
        mask=fill(-1, jnp.int32, words),
    )


def abstract_sampling_state(num_rows: int, vocab_size: int) -> SamplingState:
    """The same with `jax.ShapeDtypeStruct` leaves, to compile before anything is allocated."""
    return jax.eval_shape(lambda: make_sampling_state(num_rows, vocab_size))


def pack_row(
    params: SamplingParams, *, default_seed: int, eos_ids: tuple[int, ...] = (), num_generated: int = 0
) -> RowRecord:
    """Scalars of one request. `num_generated` is above 0 when a preempted request comes back.

    `default_seed` serves requests without a seed; seeds are folded to 32 bits. Stop ids are the request's own and,
    unless it ignores them, `eos_ids`.
    """
    stop_ids = tuple(dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else eos_ids)))
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{len(stop_ids)} stop token ids, end-of-text ids included; at most {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    seed = default_seed if params.seed is None else params.seed
    folded = np.uint32((seed ^ (seed >> 32)) & 0xFFFFFFFF).view(np.int32)
    floats = np.array(
        [
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ],
        np.float32,
    )
    ints = np.full(6 + MAX_STOP_TOKEN_IDS, NO_TOKEN_ID, np.int32)
    wants_logprobs = params.logprobs is not None
    ints[:6] = params.top_k, folded, num_generated, params.min_tokens, wants_logprobs, params.logprobs or 0
    ints[6 : 6 + len(stop_ids)] = stop_ids
    return RowRecord(floats, ints)


def set_row(state: SamplingState, slot: Int[Array, "*n"], record: RowRecord) -> SamplingState:
    """Give the slot (or slots, with stacked records) to a new request; its dense rows and mask are no longer used."""
    temperature, top_p, min_p, presence, frequency, repetition = jnp.moveaxis(record.floats, -1, 0)
    scalars, stop_ids = jnp.split(jnp.asarray(record.ints), [6], axis=-1)
    top_k, seed, num_generated, min_tokens, wants_logprobs, num_top_logprobs = jnp.moveaxis(scalars, -1, 0)
    values = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence": presence,
        "frequency": frequency,
        "repetition": repetition,
        "seed": lax.bitcast_convert_type(seed, jnp.uint32),
        "num_generated": num_generated,
        "min_tokens": min_tokens,
        "stop_ids": stop_ids,
        "wants_logprobs": wants_logprobs != 0,
        "num_top_logprobs": num_top_logprobs,
        "uses_dense": False,
        "has_mask": False,
    }
    return replace(
        state, **{name: getattr(state, name).at[slot].set(value) for name, value in values.items()}
    )


def set_dense_row(
    state: SamplingState,
    slot: Int[Array, ""],
    bias: Float[Array, " V"],
    prompt_seen: Bool[Array, " V"],
    output_counts: Int[Array, " V"],
) -> SamplingState:
    """After `set_row`, for a request with a bias or penalties: what it adds, has in its prompt and has generated."""
    return replace(
        state,
        uses_dense=state.uses_dense.at[slot].set(True),
        bias=state.bias.at[slot].set(bias),
        prompt_seen=state.prompt_seen.at[slot].set(prompt_seen),
        output_counts=state.output_counts.at[slot].set(output_counts),
    )


def set_mask(state: SamplingState, slots: Int[Array, " B"], masks: Int[Array, "B W"]) -> SamplingState:
    """Allow only the tokens whose bits are set, until the next call or `set_row`. Pad with the padding slot."""
    return replace(state, mask=state.mask.at[slots].set(masks), has_mask=state.has_mask.at[slots].set(True))


def sample(
    state: SamplingState, slots: Int[Array, " B"], logits: Float[Array, "B V"], active: Bool[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"], Logprobs, SamplingState]:
    """One token for each active row: (tokens, whether each is one of its row's stop ids, log probabilities, state).

    Inactive rows get token 0, no stop, and leave the state as it was. Active rows have distinct slots.
    """
    with jax.named_scope("sample"):
        adjusted = _adjust(state, slots, logits, active)
        greedy = _first_argmax(adjusted)
        is_random = active & (state.temperature[slots] > 0)
        tokens = lax.cond(
            jnp.any(is_random),
            lambda: jnp.where(is_random, _draw(state, slots, adjusted, is_random), greedy),
            lambda: greedy,
        )
        tokens = jnp.where(active, tokens, 0)
        hit_stop = active & jnp.any(state.stop_ids[slots] == tokens[:, None], axis=1)
        logprobs = _logprobs(state, slots, logits, tokens, active)
        counts = (active & state.uses_dense[slots]).astype(jnp.int32)
        state = replace(
            state,
            num_generated=state.num_generated.at[slots].add(active.astype(jnp.int32)),
            output_counts=state.output_counts.at[slots, tokens].add(counts),
        )
        return tokens, hit_stop, logprobs, state


def score(
    logits: Float[Array, "N V"], targets: Int[Array, " N"]
) -> tuple[Float[Array, " N"], Int[Array, "N {MAX_TOP_LOGPROBS}"], Float[Array, "N {MAX_TOP_LOGPROBS}"]]:
    """Log probability of each target, and the best tokens with theirs: (logprob, top ids, top values)."""
    with jax.named_scope("score"):
        log_total = jax.nn.logsumexp(logits, axis=1)
        return _chosen(logits, log_total, targets), *_top(logits, log_total)


def _adjust(
    state: SamplingState, slots: Int[Array, " B"], logits: Float[Array, "B V"], active: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    """Logits after mask, minimum length, bias and penalties; the same array if no active row has any."""
    masked = active & state.has_mask[slots]
    too_short = active & (state.num_generated[slots] < state.min_tokens[slots])
    dense = active & state.uses_dense[slots]

    def adjust() -> Float[Array, "B V"]:
        x = lax.cond(jnp.any(masked), lambda: _apply_mask(state, slots, logits, masked), lambda: logits)
        x = lax.cond(jnp.any(too_short), lambda: _suppress_stops(state, slots, x, too_short), lambda: x)
        return lax.cond(jnp.any(dense), lambda: _bias_and_penalise(state, slots, x, dense), lambda: x)

    return lax.cond(jnp.any(masked | too_short | dense), adjust, lambda: logits)


def _apply_mask(
    state: SamplingState, slots: Int[Array, " B"], x: Float[Array, "B V"], masked: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    words = state.mask[slots]
    bits = (words[:, :, None] >> jnp.arange(MASK_BITS)[None, None, :]) & 1  # [B, W, 32]
    allowed = bits.reshape(words.shape[0], -1)[:, : x.shape[1]] == 1
    return jnp.where(allowed | ~masked[:, None], x, -jnp.inf)


def _suppress_stops(
    state: SamplingState, slots: Int[Array, " B"], x: Float[Array, "B V"], too_short: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    """A row whose grammar allows nothing but a stop id keeps it: a short answer is better than a wrong one."""
    ids = jnp.where(too_short[:, None], state.stop_ids[slots], NO_TOKEN_ID)
    rows = jnp.arange(x.shape[0])[:, None]
    without = x.at[rows, ids].set(-jnp.inf, mode="drop")
    return jnp.where(jnp.max(without, axis=1, keepdims=True) > -jnp.inf, without, x)


def _bias_and_penalise(
    state: SamplingState, slots: Int[Array, " B"], x: Float[Array, "B V"], dense: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    """Bias; then repetition over prompt and output (divide if positive, multiply if not); then counts of outputs."""
    counts = state.output_counts[slots]
    seen = state.prompt_seen[slots] | (counts > 0)
    repetition = jnp.where(seen, state.repetition[slots][:, None], 1.0)
    y = x + state.bias[slots]
    y = jnp.where(y > 0, y / repetition, y * repetition)
    y = y - state.frequency[slots][:, None] * counts - state.presence[slots][:, None] * (counts > 0)
    return jnp.where(dense[:, None], y, x)


def _draw(
    state: SamplingState, slots: Int[Array, " B"], x: Float[Array, "B V"], needed: Bool[Array, " B"]
) -> Int[Array, " B"]:
    return draw_tokens(
        x,
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        seed=state.seed[slots],
        position=state.num_generated[slots],
        needed=needed,
    )


def _first_argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """`jnp.argmax`, in two passes that XLA vectorises on CPU (seven times as fast there)."""
    num_tokens = x.shape[1]
    is_top = x == jnp.max(x, axis=1, keepdims=True)
    first = jnp.min(jnp.where(is_top, jnp.arange(num_tokens, dtype=jnp.int32)[None, :], num_tokens), axis=1)
    return jnp.minimum(first, num_tokens - 1)  # a row of NaN has no top


def _logprobs(
    state: SamplingState,
    slots: Int[Array, " B"],
    logits: Float[Array, "B V"],
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> Logprobs:
    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    no_top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def compute() -> Logprobs:
        log_total = jax.nn.logsumexp(logits, axis=1)
        wants_top = jnp.any(active & (state.num_top_logprobs[slots] > 0))
        top_ids, top_values = lax.cond(wants_top, lambda: _top(logits, log_total), lambda: no_top)
        return Logprobs(_chosen(logits, log_total, tokens), top_ids, top_values)

    wants = jnp.any(active & state.wants_logprobs[slots])
    return lax.cond(wants, compute, lambda: Logprobs(jnp.zeros(shape[:1], jnp.float32), *no_top))


def _chosen(
    logits: Float[Array, "N V"], log_total: Float[Array, " N"], tokens: Int[Array, " N"]
) -> Float[Array, " N"]:
    return jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - log_total


def _top(
    logits: Float[Array, "N V"], log_total: Float[Array, " N"]
) -> tuple[Int[Array, "N {MAX_TOP_LOGPROBS}"], Float[Array, "N {MAX_TOP_LOGPROBS}"]]:
    """The best tokens first; a vocabulary smaller than the list leaves its tail at id 0 and minus infinity."""
    num = min(MAX_TOP_LOGPROBS, logits.shape[1])
    values, ids = lax.top_k(logits, num)
    padding = ((0, 0), (0, MAX_TOP_LOGPROBS - num))
    return jnp.pad(ids, padding), jnp.pad(values - log_total[:, None], padding, constant_values=-np.inf)
