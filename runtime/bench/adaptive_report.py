"""From the rounds of a comparison to its result: figures by mode, paired ratios, targets and by how much they were missed."""

import statistics
from collections.abc import Sequence
from typing import Any

from runtime.bench.adaptive_modes import Way
from runtime.bench.adaptive_rounds import Round
from runtime.bench.paired import Interval, bootstrap_median, paired_ratios
from runtime.bench.report import print_table

# name of the ratio -> figure of which it is made
RATIOS = {
    "throughput_vs_static": (Way.STATIC, "tok_s"),
    "p99_vs_static": (Way.STATIC, "p99_ms"),
    "goodput_vs_static": (Way.STATIC, "goodput"),
    "throughput_vs_best_fixed": (Way.FIXED, "tok_s"),
    "p99_vs_best_fixed": (Way.FIXED, "p99_ms"),
    "p99_ttft_vs_best_fixed": (Way.FIXED, "p99_ttft_ms"),
    "p99_itl_vs_best_fixed": (Way.FIXED, "p99_itl_ms"),
    "goodput_vs_best_fixed": (Way.FIXED, "goodput"),
}
SWING_TARGET = 0.12
_FLOOR = 1e-6  # a goodput of zero has no ratio


def by_way(rounds: Sequence[Sequence[Round]]) -> dict[Way, list[dict[str, Any]]]:
    """Each mode's figures, round by round."""
    return {
        way: [next(r for r in played if r.mode.way is way).figures for played in rounds]
        for way in (Way.STATIC, Way.FIXED, Way.DYNAMIC)
    }


def medians(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median over the rounds of every figure, and the rounds themselves."""
    keys = [key for key, value in figures[0].items() if isinstance(value, int | float)]
    return {key: round(statistics.median(f[key] for f in figures), 4) for key in keys} | {
        "rounds": list(figures)
    }


def ratios_of(rounds: Sequence[Sequence[Round]]) -> dict[str, Interval]:
    """Dynamic over the other, by pair; the median with its interval."""
    ways = by_way(rounds)
    found = {}
    for name, (other, key) in RATIOS.items():
        mine = [max(_FLOOR, f[key]) for f in ways[Way.DYNAMIC]]
        theirs = [max(_FLOOR, f[key]) for f in ways[other]]
        found[name] = bootstrap_median(paired_ratios(mine, theirs))
    return found


def judge(ratios: dict[str, Interval], p99_swing: float | None, late_compiles: int) -> dict[str, Any]:
    """Every target with what was found; `missed_by` is zero where it was met, in the unit of the figure."""
    r = ratios

    def at_least(found: float, wanted: float) -> dict[str, Any]:
        return _verdict(found, wanted, wanted - found, "at least")

    def at_most(found: float, wanted: float) -> dict[str, Any]:
        return _verdict(found, wanted, found - wanted, "at most")

    gain = max(1 - r["p99_vs_best_fixed"].median, r["goodput_vs_best_fixed"].median - 1)
    targets = {
        "throughput_vs_static": at_least(r["throughput_vs_static"].median, 1.58),
        "p99_vs_static": at_most(r["p99_vs_static"].median, 0.5),
        "throughput_vs_best_fixed_low": at_least(r["throughput_vs_best_fixed"].low, 0.97),
        "goodput_vs_best_fixed": at_least(r["goodput_vs_best_fixed"].median, 0.97),
        "p99_ttft_vs_best_fixed": at_most(r["p99_ttft_vs_best_fixed"].median, 1.03),
        "p99_itl_vs_best_fixed": at_most(r["p99_itl_vs_best_fixed"].median, 1.03),
        "gain_vs_best_fixed_in_p99_or_goodput": at_least(gain, 0.12),
        "late_compiles": at_most(late_compiles, 0),
    }
    if p99_swing is not None:
        targets["p99_swing_at_steady_load"] = at_most(p99_swing, SWING_TARGET)
    return targets


def show(result: dict[str, Any]) -> None:
    keys = ("tok_s", "p50_ms", "p99_ms", "p99_ttft_ms", "p99_itl_ms", "goodput", "goodput_share", "p99_swing",
            "utilisation_bytes", "utilisation_flop")  # fmt: skip
    rows = [
        (result[way].get("label", way), *(result[way].get(key) for key in keys))
        for way in ("static", "fixed", "dynamic")
    ]
    print_table(f"{result['model']}: medians of {result['pairs']} pairs", ("mode", *keys), rows)
    ratios = [(name, r["median"], r["low"], r["high"]) for name, r in result["ratio"].items() if r]
    print_table("dynamic over the other", ("ratio", "median", "low", "high"), ratios)
    targets = [
        (
            name,
            t["bound"],
            t["target"],
            t["found"],
            "met" if t["is_met"] else f"missed by {t['missed_by']:.3g}",
        )
        for name, t in result["targets"].items()
    ]
    print_table("targets", ("target", "", "wanted", "found", ""), targets)
    slo, load = result["slo"], result["load"]
    print(
        f"promises: TTFT {1e3 * slo['ttft_s']:g} ms, time per token {1e3 * slo['itl_s']:g} ms ({slo['rule']}); "
        f"load {load['requests_s']:.3g} requests/s, {load['share_of_capacity']:.2f} of capacity on average, "
        f"{load['peak_share_of_capacity']:.2f} at the peak; lengths x{load['length_scale']:.4g}; "
        f"late_compiles={result['late_compiles']}; {result['seconds']:.0f} s"
    )
    print(
        f"full steps of both phases would give {load['ceiling_tok_s']:.0f} tokens/s, "
        f"{load['ceiling_tok_s'] / result['static']['tok_s']:.2f} times static: prompts cost the same in every mode"
    )
    for load_name, rows in result["virtual"]["swinging"].items():
        keys = ("p50_ms", "p99_ms", "p99_ttft_ms", "p99_itl_ms", "goodput_share")
        cells = [(row["mode"], *(row[key] for key in keys)) for row in rows]
        print_table(f"virtual clock, swinging load, {load_name.replace('_', ' ')}", ("mode", *keys), cells)


def _verdict(found: float, wanted: float, missing: float, bound: str) -> dict[str, Any]:
    return {
        "bound": bound,
        "target": wanted,
        "found": round(found, 4),
        "is_met": missing <= 0,
        "missed_by": round(max(0.0, missing), 4),
    }
