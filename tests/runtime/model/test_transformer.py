"""The forward pass against transformers (fixtures), and against itself: batched, chunked, padded, paged in any order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.cache.kv_pool import KVPool
from runtime.model.architecture import from_hf_config
from runtime.model.params import init_params
from tests.runtime.model.builders import CHECKPOINTS, FIXTURE_NAMES, QWEN3_CONFIG, Chunk, Runner

WINDOWED: dict[str, Any] = {**QWEN3_CONFIG, "use_sliding_window": True, "sliding_window": 11}
CONFIGS = {"full": QWEN3_CONFIG, "windowed": WINDOWED}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def expected_of(name: str) -> tuple[list[list[int]], list[np.ndarray], list[list[int]]]:
    """Prompts, logits of each prompt's last positions, greedy continuations."""
    data = np.load(CHECKPOINTS / name / "expected.npz", allow_pickle=False)
    prompts, logits, greedy = (
        [data[f"{key}_{i}"] for i in range(3)] for key in ("prompt", "logits", "greedy")
    )
    return [p.tolist() for p in prompts], logits, [g.tolist() for g in greedy]


def runner_of(config: dict[str, Any], **options: Any) -> Runner:
    arch = from_hf_config(config)
    return Runner(arch, init_params(arch, jnp.float32, seed=3), **options)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def prompt_logits(runner: Runner, tokens: list[int], first_page: int = 1) -> np.ndarray:
    """Logits [n, V] of all positions, in one prefill."""
    (logits,), _ = runner.prefill([Chunk(tokens, runner.pages(first_page, len(tokens)))])
    return logits


def test_every_fixture_is_there() -> None:
    assert len(FIXTURE_NAMES) == 9


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_float32_agrees_with_transformers(name: str) -> None:
    prompts, expected, greedy = expected_of(name)
    runner = Runner.load(CHECKPOINTS / name, page_size=16, num_pages=40)
    logits, _ = runner.prefill([Chunk(p, runner.pages(1 + 12 * i, len(p))) for i, p in enumerate(prompts)])
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_allclose(ours[-len(theirs) :], theirs, **CLOSE)
    assert runner.greedy(prompts, len(greedy[0])) == greedy


@pytest.mark.parametrize("name", ["qwen3-yarn-top8", "mixtral", "olmoe-clip"])
def test_bfloat16_stays_near_transformers(name: str) -> None:
    prompts, expected, _ = expected_of(name)
    runner = Runner.load(CHECKPOINTS / name, dtype=jnp.bfloat16, page_size=16, num_pages=40)
    logits, _ = runner.prefill([Chunk(p, runner.pages(1 + 12 * i, len(p))) for i, p in enumerate(prompts)])
    for ours, theirs in zip(logits, expected, strict=True):
        error = np.abs(ours[-len(theirs) :] - theirs)
        # A near tie in the router may fall the other way for a token, so the bound is on the typical error.
        assert np.median(error) < 0.02 * theirs.std()
        assert np.mean(error) < 0.06 * theirs.std()


def test_batched_equals_one_by_one(config: dict[str, Any]) -> None:
    prompts = [tokens_of(n, seed=n) for n in (3, 16, 1, 70, 9)]
    together = runner_of(config).greedy(prompts, 12)
    alone = [runner_of(config).greedy([prompt], 12)[0] for prompt in prompts]
    assert together == alone


def test_chunked_prefill_equals_whole(config: dict[str, Any]) -> None:
    tokens = tokens_of(150)
    whole = prompt_logits(runner_of(config), tokens)
    runner = runner_of(config)
    pages = runner.pages(1, 150)
    parts, start = [], 0
    for end in (4, 20, 84, 150):
        parts += runner.prefill([Chunk(tokens[start:end], pages, start)])[0]
        start = end
    np.testing.assert_allclose(np.concatenate(parts), whole, **CLOSE)


def test_decode_after_prefill_equals_prefill_of_all(config: dict[str, Any]) -> None:
    tokens = tokens_of(140)
    whole = prompt_logits(runner_of(config), tokens)
    runner = runner_of(config)
    pages = runner.pages(1, 140)
    runner.prefill(
        [Chunk(tokens[:122], pages)]
    )  # decode passes position 128, where a second block of keys begins
    for position in range(122, 140):
        logits, _ = runner.decode([Chunk([tokens[position]], pages, position)])
        np.testing.assert_allclose(logits[0], whole[position], **CLOSE)


def test_rows_of_different_length_decode_together(config: dict[str, Any]) -> None:
    lengths = (1, 17, 133)
    prompts = [tokens_of(n + 1, seed=n) for n in lengths]
    expected = [prompt_logits(runner_of(config), p)[-1] for p in prompts]
    runner = runner_of(config)
    pages = [runner.pages(first, n + 1) for first, n in zip((1, 3, 10), lengths, strict=True)]
    runner.prefill([Chunk(p[:-1], g) for p, g in zip(prompts, pages, strict=True)])
    rows = [Chunk([p[-1]], g, n) for p, g, n in zip(prompts, pages, lengths, strict=True)]
    logits, counts = runner.decode([rows[0], None, rows[1], rows[2], None])
    np.testing.assert_allclose(logits[[0, 2, 3]], expected, **CLOSE)
    assert counts.sum(1).tolist() == [6, 6]  # three real rows, two experts each


def poison(runner: Runner, keep: list[int]) -> None:
    """NaN in every page but those of `keep`."""
    is_kept = np.isin(np.arange(runner.num_pages), keep).reshape(-1, 1, 1, 1, 1)
    runner.pool = KVPool(tuple(jnp.where(is_kept, p, jnp.nan) for p in runner.pool.pages))


def test_padding_changes_nothing_and_foreign_pages_are_never_read(config: dict[str, Any]) -> None:
    first, second = tokens_of(22, seed=1), tokens_of(7, seed=2)
    plain = runner_of(config)
    pages = [plain.pages(1, 26), plain.pages(20, 10)]
    expected, expected_counts = plain.prefill(
        [Chunk(first, pages[0]), Chunk(second, pages[1])], 32, num_rows=2
    )
    padded = runner_of(config)
    poison(padded, keep=[])
    logits, counts = padded.prefill([Chunk(first, pages[0]), Chunk(second, pages[1])])
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    np.testing.assert_array_equal(counts, expected_counts)
    assert counts.sum(1).tolist() == [58, 58]  # 29 tokens, two experts each
    rows = [Chunk([5], pages[0], 22), Chunk([6], pages[1], 7)]
    np.testing.assert_allclose(padded.decode(rows)[0][:2], plain.decode(rows, num_rows=2)[0], **CLOSE)


def test_an_all_padding_step_touches_the_dummy_page_only(config: dict[str, Any]) -> None:
    runner = runner_of(config)
    prompt_logits(runner, tokens_of(30))
    before = [np.asarray(p) for p in runner.pool.pages]
    _, prefill_counts = runner.prefill([], num_tokens=256)
    _, decode_counts = runner.decode([None])
    assert prefill_counts.sum() == decode_counts.sum() == 0
    for old, new in zip(before, runner.pool.pages, strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])


def test_a_step_writes_its_own_pages_only() -> None:
    runner = runner_of(QWEN3_CONFIG)
    poison(runner, keep=[])
    runner.prefill([Chunk(tokens_of(6), [7, 3])])
    runner.decode([Chunk([1], [7, 3, 12], 8), None])
    for pages in runner.pool.pages:
        is_written = ~np.isnan(np.asarray(pages)).all(axis=(1, 2, 3, 4))
        assert sorted(set(np.flatnonzero(is_written).tolist()) - {0}) == [3, 7, 12]


def test_pages_may_lie_anywhere() -> None:
    tokens = tokens_of(41)
    in_order, scattered = runner_of(QWEN3_CONFIG), runner_of(QWEN3_CONFIG)
    pages = np.random.default_rng(0).permutation(np.arange(1, 80))[:11].tolist()
    expected = prompt_logits(in_order, tokens)
    np.testing.assert_allclose(scattered.prefill([Chunk(tokens, pages)])[0][0], expected, **CLOSE)


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_page_size_does_not_matter(page_size: int) -> None:
    prompt = tokens_of(37)
    expected = runner_of(QWEN3_CONFIG).greedy([prompt], 4)
    assert (
        runner_of(QWEN3_CONFIG, page_size=page_size, table_width=-(-256 // page_size)).greedy([prompt], 4)
        == expected
    )


def test_a_window_forgets_what_lies_before_it() -> None:
    runner = runner_of(WINDOWED)
    tokens = tokens_of(150)
    expected = prompt_logits(runner, tokens)[-1]
    pages = runner.pages(1, 150)
    two_layers_back = pages[(150 - 1 - 11) // 4 :]
    poison(runner, keep=two_layers_back)
    logits, _ = runner.decode([Chunk([tokens[-1]], pages, 149)])
    np.testing.assert_allclose(logits[0], expected, **CLOSE)


def test_a_full_table_has_no_hidden_limit() -> None:
    runner = runner_of(QWEN3_CONFIG, table_width=35, num_pages=40)  # 35 pages: not a multiple of a block's 32
    tokens = tokens_of(140)
    expected = prompt_logits(runner_of(QWEN3_CONFIG), tokens)[-1]
    runner.prefill([Chunk(tokens[:139], runner.pages(1, 140))])
    logits, _ = runner.decode([Chunk([tokens[139]], runner.pages(1, 140), 139)])
    np.testing.assert_allclose(logits[0], expected, **CLOSE)


def test_params_and_pool_pass_through_tree_maps() -> None:
    runner = runner_of(QWEN3_CONFIG)
    assert type(jax.tree.map(lambda a: a, runner.params)) is type(runner.params)
    assert jax.tree.map(lambda a: a.shape, runner.pool) == KVPool(tuple(p.shape for p in runner.pool.pages))
