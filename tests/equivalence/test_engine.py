"""What must not change the text: the company in the batch, chunking, the prefix cache, preemption, the rung."""

import numpy as np
import pytest

from runtime.ladder.late_compiles import monitor
from tests.engine_driver import EngineDriver, request

PROMPTS = [np.random.RandomState(i).randint(0, 128, 5 + 11 * i).tolist() for i in range(6)]
RANDOM = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11}


@pytest.fixture(scope="module")
def driver():
    driver = EngineDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def alone(driver) -> list[list[int]]:
    """Each prompt by itself, without any help from cached prefixes."""
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        driver.scheduler.clear_prefix_cache()
        outputs += driver.run([request(f"alone-{i}", prompt, max_tokens=24)])
    return outputs


def batch(tag: str, **params):
    return [request(f"{tag}-{i}", p, max_tokens=24, **params) for i, p in enumerate(PROMPTS)]


def test_batched_is_one_by_one(driver, alone):
    driver.scheduler.clear_prefix_cache()
    assert driver.run(batch("batched")) == alone


def test_with_prefix_cache_is_without(driver, alone):
    before = driver.scheduler.prefix_hits
    assert driver.run(batch("cached")) == alone
    assert driver.scheduler.prefix_hits > before


def test_sampled_text_depends_on_the_seed_alone(driver):
    one_by_one = [driver.run([r])[0] for r in batch("sampled", **RANDOM)]
    assert driver.run(batch("sampled-together", **RANDOM)) == one_by_one
    other = RANDOM | {"seed": 12}
    assert driver.run(batch("sampled-other", **other)) != one_by_one


def test_penalties_and_bias_survive_batching(driver):
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": ((5, 3.0),)}
    one_by_one = [driver.run([r])[0] for r in batch("penalised", **params)]
    mixed = [r for pair in zip(batch("m", **params), batch("plain"), strict=True) for r in pair]
    assert driver.run(mixed)[::2] == one_by_one


def test_chunked_is_whole(alone):
    driver = EngineDriver(
        ladder={"prefill_tokens": [8], "decode_rows": [4]}, kv_cache={"enable_prefix_cache": False}
    )
    try:
        assert driver.run(batch("chunked")) == alone
    finally:
        driver.close()


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_preempted_is_not(driver, cache):
    """A pool that holds one request of full length and little more: the others get preempted and come back."""
    tight = EngineDriver(
        kv_cache={"kv_cache_size": "67KiB", "enable_prefix_cache": cache},
        ladder={"decode_rows": [4], "prefill_tokens": [64]},
    )
    try:
        for name, sampling in (("greedy", {}), ("sampled", RANDOM)):
            assert tight.run(batch("tight" + name, **sampling)) == driver.run(
                batch("roomy" + name, **sampling)
            )
        assert tight.scheduler.num_preemptions > 0
    finally:
        tight.close()


def test_every_rung_is_every_other(alone):
    driver = EngineDriver(
        ladder={"prefill_tokens": [24, 64], "decode_rows": [2, 3, 6], "max_decode_steps": 1}
    )
    try:
        assert driver.run(batch("other-rungs")) == alone
    finally:
        driver.close()


def test_logprobs_are_those_of_scoring_the_text(driver):
    """Scoring prompt + output gives each output token the log probability that it was reported with."""
    output = driver.run([request("gen", PROMPTS[2], max_tokens=12, logprobs=3)])[0]
    reported = [lp for step, c in driver.steps for lps in c.logprobs for lp in lps][-12:]
    assert [lp.token_id for lp in reported] == output
    driver.run([request("score", PROMPTS[2] + output, max_tokens=1, prompt_logprobs=3)])
    scored = [
        lp
        for _, c in driver.steps
        if "score" in c.prompt_logprobs
        for lp in c.prompt_logprobs["score"].logprobs
    ]
    assert [lp.token_id for lp in scored] == (PROMPTS[2] + output)[1:]
    for told, found in zip(reported, scored[-12:], strict=True):
        assert told.logprob == pytest.approx(found.logprob, abs=1e-4)
        assert told.top[0][0] == told.token_id == found.top[0][0]


def test_stop_ids_and_minimum_length(driver):
    free = driver.run([request("free", PROMPTS[3], max_tokens=12)])[0]
    stop = free[4]
    first = free.index(stop)
    stopped = driver.run([request("stopped", PROMPTS[3], max_tokens=12, stop_token_ids=(stop,))])[0]
    assert stopped == free[: first + 1]
    longer = driver.run([request("min", PROMPTS[3], max_tokens=12, stop_token_ids=(stop,), min_tokens=8)])[0]
    assert len(longer) >= 8
    assert stop not in longer[:7]


def test_nothing_compiles_after_the_ladder(driver):
    monitor.arm()
    try:
        before = monitor.num_late
        driver.run(batch("late"))
        driver.run(
            [
                request(
                    "late-rich",
                    PROMPTS[1],
                    max_tokens=5,
                    logprobs=2,
                    presence_penalty=0.5,
                    **RANDOM | {"temperature": 0.5},
                )
            ]
        )
        driver.run([request("late-score", PROMPTS[4], max_tokens=1, prompt_logprobs=1)])
        assert monitor.num_late == before
    finally:
        monitor.disarm()


def test_a_planted_late_compile_is_seen(driver):
    import jax

    monitor.arm()
    try:
        jax.block_until_ready(jax.jit(lambda x: x * 3 + len(PROMPTS))(np.float32(2)))
        assert monitor.num_late >= 1
    finally:
        monitor.disarm()


def test_experts_count_real_tokens_only(driver):
    driver.steps.clear()
    driver.scheduler.clear_prefix_cache()
    driver.run([request("counted", PROMPTS[1], max_tokens=5)])
    total = np.sum([c.expert_tokens.sum(axis=1) for _, c in driver.steps], axis=0)
    # Every prompt token, and every output token but the last, goes to top_k = 2 experts in each layer.
    assert total.tolist() == [2 * (len(PROMPTS[1]) + 4)] * 2
