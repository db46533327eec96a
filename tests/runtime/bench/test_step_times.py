from dataclasses import replace

import pytest

from runtime.bench.adaptive_modes import DYNAMIC, Mode, Way, changed, config_of_mode, steady_tok_s
from runtime.bench.adaptive_traffic import Lengths
from runtime.bench.client import RequestTimes
from runtime.bench.limits import MachineLimits
from runtime.bench.mode_figures import open_figures, score
from runtime.bench.replay import Played
from runtime.bench.run_utilisation import run_utilisation
from runtime.bench.step_times import _line, ceiling_tok_s, scaled_to_run, slo_of
from runtime.bench.virtual import StepTimes
from runtime.config import SloConfig, parse_config
from runtime.engine.stats import RungSnapshot
from runtime.ladder.ladder import BucketLadder
from tests.runtime.bench.fake_loop import EMPTY, SHAPE

TIMES = StepTimes({4: (0.001, 0.004), 8: (0.001, 0.006)}, {64: 0.01, 128: 0.016}, 0.0)
LADDER = BucketLadder.from_config(
    parse_config(
        {
            "batch_processing": {"max_batch_size": 8},
            "ladder": {"decode_rows": [4, 8], "prefill_tokens": [64, 128], "max_prefill_tokens": 128},
        }
    ),
    256,
)


def played() -> Played:
    def rung(name: str, phase: str, size: int, hits: int, real: int, computed: int) -> RungSnapshot:
        return RungSnapshot(name, phase, size, "ready", 0.0, False, 0, hits, real, computed, 0.0)

    before = replace(
        EMPTY, rungs=(rung("decode-8", "decode", 8, 0, 0, 0), rung("prefill-64", "prefill", 64, 0, 0, 0))
    )
    rungs = (rung("decode-8", "decode", 8, 10, 240, 320), rung("prefill-64", "prefill", 64, 5, 300, 320))
    return Played((), before, replace(EMPTY, rungs=rungs, busy_s=0.6), 2.0, 0.0)


def test_two_launches_of_different_length_give_overhead_and_step() -> None:
    assert _line({1: 0.005, 8: 0.033}, 8) == (pytest.approx(0.001), pytest.approx(0.004))
    assert _line({1: 0.003, 8: 0.033}, 8) == (
        0.0,
        pytest.approx(0.033 / 8),
    )  # noise must not make it negative
    assert _line({1: 0.003}, 1) == (0.0, 0.003)


def test_times_are_scaled_to_what_the_device_was_busy() -> None:
    modelled_s = 10 * 0.001 + 40 * 0.006 + 5 * 0.01  # 320 of 8 rows are 40 steps
    scaled = scaled_to_run(TIMES, played())
    assert scaled.prefill[128] == pytest.approx(0.016 * 0.6 / modelled_s)
    assert scaled.decode[4] == pytest.approx((0.001 * 0.6 / modelled_s, 0.004 * 0.6 / modelled_s))


def test_promises_follow_the_stated_rule() -> None:
    lengths = Lengths((10,) * 80 + (150,) * 20, (5,) * 100, 1.0)
    slo = slo_of(TIMES, LADDER, lengths)
    assert slo.itl == pytest.approx(5 * 0.007)
    assert slo.ttft == pytest.approx(10 * (0.016 + 0.01))  # 150 tokens: a full rung of 128 and one of 64


def test_the_ceiling_has_full_steps_only() -> None:
    lengths = Lengths((100,), (20,), 1.0)
    assert ceiling_tok_s(TIMES, lengths) == pytest.approx(20 / (100 * 0.016 / 128 + 20 * 0.006 / 8))


def test_utilisation_counts_real_tokens_and_no_padding() -> None:
    limits = MachineLimits(read_gbps=1e-3, bf16_gflops=1e-2)
    used = run_utilisation(played(), SHAPE, limits, 10.0, "bf16")
    kv = 240 * 10 * 2 * 2 * 8
    entries = 40 * SHAPE.read(SHAPE.distinct_experts(6)) + kv + 5 * SHAPE.read(SHAPE.distinct_experts(60))
    assert used.memory == pytest.approx(entries * 2 / 2.0 / 1e6)
    decode = 240 * (2 * SHAPE.active + 4 * 10 * 2 * 16)
    prefill = 300 * (2 * (SHAPE.active - SHAPE.head) + 4 * 2 * 16 * 5)
    assert used.compute == pytest.approx((decode + prefill) / 2.0 / 1e7)


def test_steady_throughput_leaves_out_filling_and_emptying() -> None:
    times = (
        RequestTimes(4, 0.0, [1.0, 2.0], [1, 4], finished_s=2.0),
        RequestTimes(4, 0.0, [1.0, 3.0], [1, 6], finished_s=3.0),
        RequestTimes(4, 4.0, [4.5, 6.0], [2, 9], finished_s=6.0),
    )
    assert steady_tok_s(times) == pytest.approx(6 / 2.0)  # only the 6 tokens at 3.0 lie in (2, 4]
    with pytest.raises(ValueError, match="too few"):
        steady_tok_s(times[:2])


def test_only_the_dynamic_mode_lets_the_controller_choose() -> None:
    config = parse_config({})
    assert config_of_mode(config, DYNAMIC).batch_processing.enable_dynamic_batch
    fixed = config_of_mode(config, Mode(Way.FIXED, 8)).batch_processing
    assert (fixed.enable_dynamic_batch, fixed.base_batch_size) == (False, 8)
    slo = changed(config, {"slo.ttft": "203.4ms", "slo.itl": "25ms"}).slo
    assert (slo.ttft, slo.itl) == (0.2034, 0.025)


def test_the_best_setting_is_the_one_with_the_most_goodput_then_the_better_p99() -> None:
    def figures(ttft_s: float) -> dict[str, float]:
        times = [RequestTimes(4, 0.0, [ttft_s, ttft_s + 0.1], [1, 10], finished_s=ttft_s + 0.1)]
        return open_figures(times, 1.0, SloConfig.model_validate({"ttft": "200ms", "itl": "50ms"}))

    assert figures(0.1)["goodput"] == 1.0
    assert score(figures(0.1)) > score(figures(0.15)) > score(figures(0.3))
