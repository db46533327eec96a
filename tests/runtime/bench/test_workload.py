from runtime.bench.replay import plan_requests
from runtime.bench.traces import TraceRequest
from runtime.bench.workload import block_prompt, random_prompts


def test_random_prompts_differ_from_the_first_token_and_repeat_with_the_seed() -> None:
    prompts = random_prompts(50, 20, 4096, seed=3)
    assert prompts == random_prompts(50, 20, 4096, seed=3)
    assert len({p[:4] for p in prompts}) == 50
    assert all(256 <= token < 4096 - 64 for p in prompts for token in p)


def test_a_small_vocabulary_is_used_whole() -> None:
    assert {t for p in random_prompts(1, 500, 8, seed=0) for t in p} == set(range(8))


def test_equal_leading_blocks_make_an_equal_start_and_nothing_more() -> None:
    a = block_prompt((1, 2, 3), 8, 24, 4096, seed=0)
    b = block_prompt((1, 2, 9), 8, 22, 4096, seed=0)
    assert a[:16] == b[:16]
    assert a[16:20] != b[16:20]
    assert (len(a), len(b)) == (24, 22)
    assert block_prompt((1,), 8, 8, 4096, seed=1) != a[:8]


def test_a_plan_starts_at_zero_and_shares_what_the_trace_shares() -> None:
    requests = [TraceRequest(5.0, 40, 2, (1, 2)), TraceRequest(6.5, 30, 3, (1, 4)), TraceRequest(7.0, 9, 1)]
    plans = plan_requests(requests, 4096, length_scale=16 / 512, seed=0)
    assert [p.offset_s for p in plans] == [0.0, 1.5, 2.0]
    assert [len(p.prompt) for p in plans] == [40, 30, 9]
    assert plans[0].prompt[:16] == plans[1].prompt[:16] != plans[2].prompt[:16]
