"""Sampling against plain numpy: cuts, adjustments, frequencies, seeds, log probabilities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.model.sampling import (
    SamplingState,
    abstract_sampling_state,
    make_sampling_state,
    pack_row,
    sample,
    score,
    set_dense_row,
    set_mask,
    set_row,
)
from runtime.model.truncation import NUM_CANDIDATES, keep_threshold
from runtime.request import MAX_TOP_LOGPROBS, SamplingParams

NUM_ROWS = 4
SLOTS = np.arange(NUM_ROWS, dtype=np.int32)

jit_sample = jax.jit(sample)
jit_threshold = jax.jit(keep_threshold)
jit_set_row = jax.jit(set_row)
jit_set_dense_row = jax.jit(set_dense_row)


def state_of(params: list[SamplingParams], vocab_size: int, **pack: int | tuple[int, ...]) -> SamplingState:
    state = make_sampling_state(len(params), vocab_size)
    for slot, p in enumerate(params):
        state = jit_set_row(state, slot, pack_row(p, **({"default_seed": 7} | pack)))
    return state


def all_active(num: int) -> np.ndarray:
    return np.ones(num, bool)


def kept_by_sorting(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The definition: min-p, then top-k, then top-p on what is left; tokens that tie stay together."""
    kept = scaled >= (np.log(np.float32(min_p)) if min_p else -np.inf)
    if 0 < top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[::-1][top_k - 1]
    if top_p < 1:
        weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
        values = np.unique(scaled)[::-1]
        mass = np.array([weights[scaled >= v].sum() for v in values])
        kept &= scaled >= values[np.argmax(mass >= top_p * weights.sum())]
    return kept


ADVERSARIAL = {
    "flat": lambda rng, v: np.zeros(v),
    "one_hot": lambda rng, v: np.where(np.arange(v) == v // 3, 50.0, 0.0),
    "ties": lambda rng, v: rng.integers(0, 5, v) * 0.5,
    "holes": lambda rng, v: np.where(rng.random(v) < 0.7, -np.inf, rng.normal(size=v)),
    "one_left": lambda rng, v: np.where(np.arange(v) == v - 1, 0.0, -np.inf),
    "broad": lambda rng, v: rng.normal(size=v) * 0.1,
    "peaked": lambda rng, v: rng.normal(size=v) * 8,
    "huge": lambda rng, v: rng.normal(size=v) * 1e30,
    "tiny": lambda rng, v: rng.normal(size=v) * 1e-30,
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("num_tokens", [40, 1000])
def test_cuts_equal_sorting(kind: str, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    cases = [
        (k, p, m)
        for k in (0, 1, 2, 17, NUM_CANDIDATES, NUM_CANDIDATES + 1, 700, num_tokens, num_tokens + 5)
        for p in (1e-6, 0.3001, 0.9003, 0.9991, 1.0)  # no border falls on a whole number of equal tokens
        for m in (0.0, 1e-3, 0.5, 1.0)
    ]
    logits = ADVERSARIAL[kind](rng, num_tokens).astype(np.float32)
    scaled = logits - logits.max()
    batch = np.broadcast_to(scaled, (len(cases), num_tokens))
    top_k, top_p, min_p = (
        np.array(column, t) for column, t in zip(zip(*cases, strict=True), "iff", strict=True)
    )
    got = batch >= np.asarray(jit_threshold(batch, top_k, top_p, min_p, all_active(len(cases))))[:, None]
    for case, row in zip(cases, got, strict=True):
        np.testing.assert_array_equal(row, kept_by_sorting(scaled, *case), err_msg=str(case))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-30, 0, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.integers(0, 310),
    st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.01, 0.9]),
)
def test_cuts_keep_enough_and_no_more(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """With float rounding at the border allowed for: the kept mass reaches top_p, the next value above does not."""
    scaled = np.random.default_rng(len(values)).choice(np.array(values, np.float32), 300)
    scaled -= scaled.max()
    threshold = jit_threshold(scaled[None], *(np.array([x], t) for x, t in ((top_k, "i"), (top_p, "f"), (min_p, "f"))),
                              all_active(1))  # fmt: skip
    kept = scaled >= float(threshold[0])
    allowed = kept_by_sorting(scaled, top_k, 1.0, min_p)
    assert kept[scaled.argmax()]
    assert not (kept & ~allowed).any()
    if top_p < 1:
        share = np.where(allowed, np.exp(scaled.astype(np.float64)), 0)
        share /= share.sum()
        assert share[kept].sum() >= top_p - 1e-5
        assert share[scaled > scaled[kept].min()].sum() <= top_p + 1e-5
    else:
        np.testing.assert_array_equal(kept, allowed)


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = np.zeros((NUM_ROWS, 100), np.float32)
    logits[1, [30, 60]] = 2
    logits[2] = -np.inf
    logits[3] = np.nan
    state = state_of([SamplingParams(temperature=0)] * NUM_ROWS, 100)
    tokens, hit_stop, logprobs, after = jit_sample(state, SLOTS, logits, all_active(NUM_ROWS))
    assert tokens.tolist()[:3] == [0, 30, 0]
    assert 0 <= int(tokens[3]) < 100
    assert not hit_stop.any()
    assert not logprobs.chosen.any()
    assert after.num_generated.tolist() == [1, 1, 1, 1, 0]


def test_inactive_rows_leave_no_trace() -> None:
    state = state_of([SamplingParams(temperature=0, presence_penalty=1, stop_token_ids=(0,))] * NUM_ROWS, 50)
    for slot in range(NUM_ROWS):
        state = jit_set_dense_row(state, slot, np.zeros(50), np.zeros(50, bool), np.zeros(50, np.int32))
    logits = np.tile(np.arange(50, 0, -1, dtype=np.float32), (3, 1))
    slots = np.array([2, NUM_ROWS, NUM_ROWS], np.int32)  # two padding rows share the padding slot
    tokens, hit_stop, _, after = jit_sample(state, slots, logits, np.array([True, False, False]))
    assert tokens.tolist() == [0, 0, 0]
    assert hit_stop.tolist() == [True, False, False]
    assert after.num_generated.tolist() == [0, 0, 1, 0, 0]
    assert np.asarray(after.output_counts).sum(1).tolist() == [0, 0, 1, 0, 0]


def test_frequencies_match_the_distribution() -> None:
    """Chi-square over many seeds, for a plain row and for one with every cut; two vocabularies, one padded."""
    for num_tokens in (128, 1000):
        rng = np.random.default_rng(0)
        logits = np.full(num_tokens, -30, np.float32)
        logits[rng.permutation(num_tokens)[:40]] = rng.normal(size=40) * 1.5
        cut = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
        for params in (SamplingParams(temperature=1.0), cut):
            num_draws = 4096
            state = make_sampling_state(num_draws, num_tokens)
            records = [pack_row(params, default_seed=i * 7919 + 1) for i in range(num_draws)]
            state = jit_set_row(state, np.arange(num_draws), jax.tree.map(lambda *x: np.stack(x), *records))
            drawn = jit_sample(
                state, np.arange(num_draws), np.tile(logits, (num_draws, 1)), all_active(num_draws)
            )[0]
            scaled = (logits - logits.max()) / np.float32(params.temperature)
            kept = kept_by_sorting(scaled, params.top_k, params.top_p, params.min_p)
            expected = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
            expected *= num_draws / expected.sum()
            seen = np.bincount(np.asarray(drawn), minlength=num_tokens)
            assert not seen[~kept].any()
            common = expected >= 5
            chi2 = ((seen - expected)[common] ** 2 / expected[common]).sum()
            degrees = common.sum() - 1
            assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def test_draws_of_one_row_are_independent_over_steps() -> None:
    num_tokens, num_steps = 16, 512
    state = state_of([SamplingParams(seed=3)], num_tokens)
    step = jax.jit(partial(sample, slots=np.zeros(1, np.int32), active=all_active(1)))
    pairs = np.zeros((2, 2))
    last = 0
    logits = np.zeros((1, num_tokens), np.float32)
    for _ in range(num_steps):
        tokens, _, _, state = step(state, logits=logits)
        now = int(tokens[0]) % 2
        pairs[last, now] += 1
        last = now
    assert (np.abs(pairs - num_steps / 4) < 45).all()
    assert int(state.num_generated[0]) == num_steps


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    rng = np.random.default_rng(5)
    num_tokens = 500
    logits = rng.normal(size=(6, num_tokens)).astype(np.float32) * 2
    mine = SamplingParams(temperature=0.9, top_p=0.8, seed=-(2**40) + 5)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=5.0, top_p=0.99),  # takes the slow way
        SamplingParams(top_k=200),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(min_p=0.5, logprobs=5),
    ]
    alone = state_of([mine], num_tokens)
    company = state_of([*others, mine], num_tokens)
    company = jit_set_dense_row(
        company, 3, np.zeros(num_tokens), rng.random(num_tokens) < 0.5, np.zeros(num_tokens, int)
    )
    order = np.array([3, 5, 0, 1, 6, 6, 2, 4], np.int32)
    active = order < 6
    for _ in range(20):
        (token,), _, _, alone = jit_sample(alone, np.zeros(1, np.int32), logits[:1], all_active(1))
        tokens, _, _, company = jit_sample(company, order, logits[[3, 0, 1, 2, 0, 0, 4, 5]], active)
        assert int(tokens[1]) == int(token)


def test_stop_ids_and_minimum_length() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(4,))
    state = state_of([params], 64, eos_ids=(9, 4))
    logits = np.zeros((1, 64), np.float32)
    logits[0, [4, 9, 20]] = 3, 2, 1
    seen = []
    for _ in range(3):
        tokens, hit_stop, _, state = jit_sample(state, SLOTS[:1], logits, all_active(1))
        seen.append((int(tokens[0]), bool(hit_stop[0])))
    assert seen == [(20, False), (20, False), (4, True)]
    assert pack_row(SamplingParams(ignore_eos=True), default_seed=0, eos_ids=(9,)).ints[6] > 1 << 30
    with pytest.raises(InvalidRequest, match="9 stop token ids"):
        pack_row(SamplingParams(stop_token_ids=tuple(range(8))), default_seed=0, eos_ids=(9,))


def test_a_stop_id_that_alone_is_allowed_beats_the_minimum_length() -> None:
    state = state_of([SamplingParams(temperature=0, min_tokens=5, stop_token_ids=(40,))], 64)
    state = set_mask(state, SLOTS[:1], np.array([[0, 1 << 8]], np.int32))
    tokens, hit_stop, _, _ = jit_sample(state, SLOTS[:1], np.zeros((1, 64), np.float32), all_active(1))
    assert (int(tokens[0]), bool(hit_stop[0])) == (40, True)


def test_penalties_and_bias_follow_their_definition() -> None:
    rng = np.random.default_rng(1)
    num_tokens = 96
    logits = rng.normal(size=num_tokens).astype(np.float32)
    bias = np.where(rng.random(num_tokens) < 0.2, rng.normal(size=num_tokens), 0).astype(np.float32)
    prompt = rng.random(num_tokens) < 0.3
    counts = rng.integers(0, 3, num_tokens).astype(np.int32)
    params = SamplingParams(
        temperature=0, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3
    )
    state = jit_set_dense_row(state_of([params], num_tokens), 0, bias, prompt, counts)
    for _ in range(12):
        expected = logits + bias
        seen = prompt | (counts > 0)
        expected = np.where(seen, np.where(expected > 0, expected / 1.3, expected * 1.3), expected)
        expected = expected - 0.3 * counts - 0.4 * (counts > 0)
        tokens, _, _, state = jit_sample(state, SLOTS[:1], logits[None], all_active(1))
        assert int(tokens[0]) == expected.argmax()
        counts[expected.argmax()] += 1
    np.testing.assert_array_equal(state.output_counts[0], counts)
    state = jit_set_row(state, 0, pack_row(SamplingParams(temperature=0), default_seed=0))
    assert int(jit_sample(state, SLOTS[:1], logits[None], all_active(1))[0][0]) == logits.argmax()


def test_mask_allows_only_its_tokens() -> None:
    num_tokens = 100  # not a multiple of 32
    allowed = np.array([31, 32, 99])
    words = np.zeros(4, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    rows = [SamplingParams(seed=i, temperature=3.0) for i in range(64)]
    state = set_mask(state_of(rows, num_tokens), np.arange(63), np.tile(words.view(np.int32), (63, 1)))
    logits = np.random.default_rng(0).normal(size=(64, num_tokens)).astype(np.float32)
    tokens = jit_sample(state, np.arange(64), logits, all_active(64))[0]
    assert set(tokens[:63].tolist()) == set(allowed.tolist())


def test_logprobs_are_the_models_own() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(NUM_ROWS, 128)).astype(np.float32)
    rows = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, logprobs=0),
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0),
    ]
    expected = np.asarray(jax.nn.log_softmax(logits, axis=1))
    state = jit_set_dense_row(
        state_of(rows, 128), 2, np.eye(128)[7] * 100, np.zeros(128, bool), np.zeros(128, int)
    )
    tokens, _, logprobs, _ = jit_sample(state, SLOTS, logits, all_active(NUM_ROWS))
    assert int(tokens[2]) == 7
    np.testing.assert_allclose(logprobs.chosen, expected[SLOTS, tokens], rtol=1e-5)
    best = np.argsort(-logits, axis=1)[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(logprobs.top_ids, best)
    np.testing.assert_allclose(logprobs.top_values, np.take_along_axis(expected, best, 1), rtol=1e-5)
    chosen_only = jit_sample(state, SLOTS, logits, np.array([False, True, False, False]))[2]
    assert chosen_only.chosen[1] == logprobs.chosen[1]
    assert not chosen_only.top_values.any()
    chosen, top_ids, top_values = jax.jit(score)(logits, np.array([1, 2, 3, 4], np.int32))
    np.testing.assert_allclose(chosen, expected[SLOTS, [1, 2, 3, 4]], rtol=1e-5)
    np.testing.assert_array_equal(top_ids, logprobs.top_ids)
    np.testing.assert_array_equal(top_values, logprobs.top_values)


def test_runs_in_a_loop_from_abstract_shapes_with_the_state_in_place() -> None:
    num_tokens = 4096

    def steps(
        state: SamplingState, logits: jax.Array, num_steps: jax.Array
    ) -> tuple[jax.Array, SamplingState]:
        def body(i: jax.Array, carry: tuple[jax.Array, SamplingState]) -> tuple[jax.Array, SamplingState]:
            tokens, _, _, state = sample(carry[1], SLOTS, logits, all_active(NUM_ROWS))
            return carry[0].at[i].set(tokens), state

        return jax.lax.fori_loop(0, num_steps, body, (jnp.zeros((8, NUM_ROWS), jnp.int32), state))

    shapes = abstract_sampling_state(NUM_ROWS, num_tokens)
    arguments = (
        shapes,
        jax.ShapeDtypeStruct((NUM_ROWS, num_tokens), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    compiled = jax.jit(steps, donate_argnums=0).lower(*arguments).compile()
    dense = [
        line
        for line in compiled.as_text().splitlines()
        if f"s32[5,{num_tokens}]" in line and " copy(" in line
    ]
    assert not dense
    state = state_of([SamplingParams(temperature=0, presence_penalty=1.0)] * NUM_ROWS, num_tokens)
    for slot in range(NUM_ROWS):
        zeros = np.zeros(num_tokens)
        state = jit_set_dense_row(state, slot, zeros, zeros.astype(bool), zeros.astype(np.int32))
    logits = np.zeros((NUM_ROWS, num_tokens), np.float32)
    out, state = compiled(state, logits, np.int32(3))
    assert out[:, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]  # each token is penalised once it was chosen
    assert state.num_generated.tolist() == [3, 3, 3, 3, 0]
