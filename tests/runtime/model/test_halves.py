"""Two halves give what the whole gives, wherever the cut lies; and the cut lies where the work is halved."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.model.architecture import from_hf_config
from runtime.model.halves import choose_cut, halve_prefill, keys_of_linear_part
from runtime.model.params import init_params
from runtime.model.sharding import LayerSharding
from tests.runtime.model.builders import QWEN3_CONFIG, Chunk, Runner, pack_prefill

PAGE = 4
ARCH = from_hf_config(QWEN3_CONFIG)
PARAMS = init_params(ARCH, jnp.float32, seed=3)
choose = jax.jit(choose_cut, static_argnums=1)


def runner(num_halves: int, **options: Any) -> Runner:
    return Runner(ARCH, PARAMS, page_size=PAGE, sharding=LayerSharding(num_halves=num_halves), **options)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


@pytest.mark.parametrize(
    ("lengths", "context"),
    [([101], 0), ([5, 9, 3, 30, 2], 0), ([60, 20], 100), ([256], 0)],
    ids=["one-long", "many-short", "continued-on-long-context", "full"],
)
def test_halves_are_the_whole(lengths, context) -> None:
    """The first prompt goes on where `context` tokens of it have been computed before."""

    def logits_of(num_halves: int) -> list[np.ndarray]:
        run, chunks, first = runner(num_halves), [], 1
        for i, length in enumerate(lengths):
            start = context if i == 0 else 0
            pages = run.pages(first, start + length)
            first += len(pages)
            prompt = tokens_of(start + length, i)
            if start:
                run.prefill([Chunk(prompt[:start], pages)])
            chunks.append(Chunk(prompt[start:], pages, start))
        logits, counts = run.prefill(chunks)
        return [*logits, counts]

    for whole, halves in zip(logits_of(1), logits_of(2), strict=True):
        np.testing.assert_allclose(halves, whole, rtol=1e-5, atol=1e-5)


def test_decoded_text_is_the_same() -> None:
    prompts = [tokens_of(n, n) for n in (3, 11, 6, 40, 9)]

    def text_of(num_halves: int) -> list[list[int]]:
        run = runner(num_halves)
        pages, first = [], 1
        for prompt in prompts:
            pages.append(run.pages(first, len(prompt) + 4))
            first += len(pages[-1])
        run.prefill([Chunk(p, g) for p, g in zip(prompts, pages, strict=True)])
        steps = []
        for i in range(3):
            out, _ = run.decode(
                [Chunk([i], g, len(p) + i) for p, g in zip(prompts, pages, strict=True)], num_rows=8
            )
            steps.append(out[:5])
        return np.argmax(steps, axis=-1).tolist()

    assert text_of(2) == text_of(1)


def work(num: int, start: int, linear: float) -> float:
    return num * (linear + start + num / 2)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6), st.floats(0.0, 200.0)
)
@settings(max_examples=60, deadline=None)
def test_no_other_cut_is_nearer_to_equal_work(rows, linear) -> None:
    chunks = [Chunk([1] * num, [1], PAGE * pages) for num, pages in rows]
    batch = pack_prefill(chunks, PAGE, 2, 256, 7)
    cut = int(choose(batch, PAGE, linear))
    assert cut % PAGE == 0
    ends = [int(s) + len(c.tokens) for s, c in zip(batch.row_start, chunks, strict=False)]
    assert max(0, ends[-1] - 128) <= cut <= 128  # each half has room for its part

    def difference(at: int) -> float:
        before = [
            min(max(at - int(s), 0), len(c.tokens)) for s, c in zip(batch.row_start, chunks, strict=False)
        ]
        first = sum(work(n, c.start, linear) for n, c in zip(before, chunks, strict=True))
        return abs(2 * first - sum(work(len(c.tokens), c.start, linear) for c in chunks))

    allowed = [at for at in range(0, 129, PAGE) if at >= ends[-1] - 128]
    assert difference(cut) <= min(map(difference, allowed)) * (1 + 1e-4) + 0.5


def test_each_token_is_in_one_half() -> None:
    chunks = [Chunk(tokens_of(n, n), [1], 8) for n in (30, 50, 7)]
    batch = pack_prefill(chunks, PAGE, 2, 128, 5)
    for cut in (28, 32, 64):
        halves = halve_prefill(batch, jnp.int32(cut))
        found = []
        for half in halves:
            starts, lengths = np.asarray(half.row_start), np.asarray(half.row_len)
            assert all(a <= b for a, b in pairwise(starts))
            found.append(
                [np.asarray(half.tokens)[s : s + n].tolist() for s, n in zip(starts, lengths, strict=True)]
            )
        joined = [first + second for first, second in zip(*found, strict=True)]
        assert joined[:3] == [c.tokens for c in chunks]
        np.testing.assert_array_equal(halves[1].context_len, batch.context_len + halves[0].row_len)


def test_the_linear_part_in_keys() -> None:
    """Qwen3-30B-A3B: 2048 wide, 32 heads and 4 of keys and values: 2304 keys."""
    arch = from_hf_config(
        QWEN3_CONFIG
        | {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    )
    assert keys_of_linear_part(arch) == 2304
