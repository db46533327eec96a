import argparse

import pytest

from runtime.bench import offline, running
from runtime.bench.limits import MachineLimits
from runtime.bench.offline import OfflinePlan, add_bounds, measure, overrides_for
from tests.runtime.bench.fake_loop import SHAPE, FakeLoop, fake_engine


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return parser.parse_args(argv)


def test_decode_rate_leaves_prefill_out_and_every_prompt_is_new() -> None:
    loop = FakeLoop(step_s=0.02)
    plan = OfflinePlan(concurrency=(1, 4), input_len=12, output_len=9, prefill=((20, 2),), repeats=3)
    result = measure(fake_engine(loop), plan)
    loop.stop()
    assert [(c["concurrency"], c["repeats"]) for c in result["decode"]] == [(1, 3), (4, 3)]
    # eight further steps of at least 20 ms for one token each
    assert 0 < result["decode"][0]["tokens_s"] < 1 / 0.02 * 1.5
    assert result["prefill"][0]["tokens_s"] > 0
    measured = loop.prompts[2:]
    assert len(measured) == 3 * (2 * 1 + 2 * 4 + 2)
    assert len(set(measured)) == len(measured)
    assert result["late_compiles"] == 0


def test_decode_steps_lost_in_noise_have_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_generate", lambda *_, **__: 0.5)
    loop = FakeLoop()
    result = measure(fake_engine(loop), OfflinePlan((1,), 4, 2, ((4, 1),), 2))
    loop.stop()
    add_bounds(result, SHAPE, MachineLimits(read_gbps=0.001))
    (decode,), (prefill,) = result["decode"], result["prefill"]
    assert (decode["tokens_s"], decode["percent_of_bound"], decode["repeats"]) == (None, None, 0)
    assert (prefill["tokens_s"], prefill["repeats"]) == (8.0, 2)
    result |= {"machine": {"cores": 2, "jax": "0"}, "limits_before": None, "peak_mib": 1}
    offline.show(result)


def test_late_compiles_of_the_run_are_reported() -> None:
    loop = FakeLoop()
    engine = fake_engine(loop)
    loop.late_compiles = 3  # before the run: none of its business

    original = loop.submit
    loop.submit = lambda requests, /: (setattr(loop, "late_compiles", 5), original(requests))[1]  # type: ignore[method-assign]
    result = measure(engine, OfflinePlan((1,), 4, 2, (), 1))
    loop.stop()
    assert result["late_compiles"] == 2


def test_a_short_answer_is_an_error_and_not_a_fast_result() -> None:
    loop = FakeLoop(refuse=["offline-9-1-0"])
    with pytest.raises(RuntimeError, match="0 tokens instead of 1"):
        measure(fake_engine(loop), OfflinePlan((1,), 4, 2, (), 1))
    loop.stop()


def test_bounds_follow_the_machine() -> None:
    result = {
        "config": {"model": {"dtype": "bf16"}},
        "decode": [{"concurrency": 1, "input": 16, "output": 4, "tokens_s": 100.0}],
        "prefill": [{"concurrency": 8, "input": 64, "tokens_s": 100.0}],
    }
    add_bounds(result, SHAPE, MachineLimits(read_gbps=10.0, bf16_gflops=100.0, f32_gflops=50.0))
    assert result["decode"][0]["limited_by"] == "memory"
    assert result["decode"][0]["percent_of_bound"] == round(
        100 * 100 / result["decode"][0]["bound_tokens_s"], 1
    )
    assert result["prefill"][0]["limited_by"] == "compute"


def test_overrides_switch_the_prefix_cache_off_and_cover_the_largest_case() -> None:
    args = parse("--concurrency", "1,32", "--prefill", "512x40", "--set", "ladder.max_prefill_tokens=128")
    plan = OfflinePlan(args.concurrency, args.input, args.output, args.prefill, args.repeats)
    config = running.config_of(args, overrides_for(plan, SHAPE))
    assert not config.kv_cache.enable_prefix_cache
    assert config.batch_processing.max_batch_size == 40
    assert config.ladder.max_prefill_tokens == 128
    positions = config.kv_cache.kv_cache_size.of(0) / (SHAPE.num_layers * 2 * SHAPE.kv_dim * 2)
    assert positions >= 512 * 40


@pytest.mark.parametrize(
    "argv", [["--prefill", "512"], ["--prefill", "0x8"], ["--concurrency", "0"], ["--concurrency", "a"]]
)
def test_wrong_cases_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert "error" in capsys.readouterr().err
