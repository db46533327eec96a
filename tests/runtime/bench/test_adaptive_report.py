import pytest

from runtime.bench.adaptive_modes import DYNAMIC, Mode, Way
from runtime.bench.adaptive_report import by_way, judge, medians, ratios_of
from runtime.bench.adaptive_rounds import Round, sizes_of_round
from runtime.bench.paired import Interval

STATIC, FIXED = Mode(Way.STATIC, 16, 0.05), Mode(Way.FIXED, 32)
BASE = {"p99_ms": 100.0, "goodput": 10.0, "p99_ttft_ms": 50.0, "p99_itl_ms": 20.0}


def one(mode: Mode, number: int, tok_s: float, **figures: float) -> Round:
    return Round(mode, number, BASE | {"tok_s": tok_s} | figures, [], [])


def test_ratios_are_taken_within_a_round_whatever_the_order_and_the_machine_does() -> None:
    rounds = []
    for number, speed in enumerate((1.0, 0.5, 2.0)):
        played = [
            one(STATIC, number, 100 * speed, p99_ms=400 / speed),
            one(FIXED, number, 200 * speed),
            one(DYNAMIC, number, 210 * speed, p99_ms=100 / speed, goodput=15.0),
        ]
        rounds.append(played[::-1] if number % 2 else played)
    found = ratios_of(rounds)
    assert found["throughput_vs_static"] == Interval(*[pytest.approx(2.1)] * 3)
    assert found["throughput_vs_best_fixed"].median == pytest.approx(1.05)
    assert found["p99_vs_static"].median == pytest.approx(0.25)
    assert found["goodput_vs_best_fixed"].median == pytest.approx(1.5)
    assert medians(by_way(rounds)[Way.STATIC])["tok_s"] == 100


def test_a_goodput_of_zero_is_no_crash() -> None:
    rounds = [[one(STATIC, 0, 1.0, goodput=0.0), one(FIXED, 0, 1.0), one(DYNAMIC, 0, 1.0)]]
    assert ratios_of(rounds)["goodput_vs_static"].median > 1e6


def ratios(**changes: tuple[float, float, float]) -> dict[str, Interval]:
    good = {
        "throughput_vs_static": (1.6, 1.5, 1.7), "p99_vs_static": (0.4, 0.3, 0.5),
        "throughput_vs_best_fixed": (1.0, 0.98, 1.02), "p99_vs_best_fixed": (0.87, 0.8, 0.9),
        "p99_ttft_vs_best_fixed": (1.0, 0.9, 1.1), "p99_itl_vs_best_fixed": (1.0, 0.9, 1.1),
        "goodput_vs_best_fixed": (1.0, 0.9, 1.1),
    }  # fmt: skip
    return {name: Interval(*values) for name, values in (good | changes).items()}


def test_targets_are_met_or_missed_by_so_much() -> None:
    assert all(target["is_met"] for target in judge(ratios(), 0.1, 0).values())
    found = judge(
        ratios(
            throughput_vs_static=(1.4, 1.3, 1.9),
            throughput_vs_best_fixed=(1.1, 0.95, 1.2),
            p99_vs_best_fixed=(0.95, 0.9, 1.0),
            goodput_vs_best_fixed=(1.05, 1.0, 1.1),
        ),
        0.2,
        1,
    )
    missed = {name: target["missed_by"] for name, target in found.items() if not target["is_met"]}
    assert missed == {
        "throughput_vs_static": pytest.approx(0.18),
        "throughput_vs_best_fixed_low": pytest.approx(0.02),  # the lower end counts, not the median
        "gain_vs_best_fixed_in_p99_or_goodput": pytest.approx(0.07),
        "p99_swing_at_steady_load": pytest.approx(0.08),
        "late_compiles": 1,
    }


def test_a_round_fits_its_time_and_never_gets_too_small() -> None:
    num_saturated, num_open = sizes_of_round(60.0, 40.0, 3, 192)
    assert (num_saturated, num_open) == (192, 442)
    assert sizes_of_round(600.0, 40.0, 3, 192)[0] > 192
    assert sizes_of_round(0.1, 40.0, 3, 192) == (192, 60)
