"""What the virtual clock is used for: its error against the engine, and steady load with many requests."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from runtime.adaptive.controller import Controller
from runtime.adaptive.decision import DecisionLog
from runtime.bench.adaptive_modes import OPEN_PER_ROW, Mode, Way, config_of_mode, steady_tok_s
from runtime.bench.adaptive_rounds import Round, Workload
from runtime.bench.adaptive_traffic import Job
from runtime.bench.mode_figures import e2e_s, open_figures
from runtime.bench.paired import bootstrap_median, chance_swing, window_p99, window_swing
from runtime.bench.virtual import Ticker, VirtualEngine, VirtualMachine, VirtualRun
from runtime.bench.virtual_feeds import ClosedFeed, Feed, OpenFeed, StaticFeed
from runtime.config import EngineConfig

_SATURATION_SHARE = 0.98  # a mode whose throughput is below the load by more never gets steady


def simulate(
    machine: VirtualMachine, config: EngineConfig, mode: Mode, jobs: Sequence[Job], *, is_open: bool
) -> VirtualRun:
    """One run of a mode, with the controller that the engine has."""
    config = config_of_mode(config, mode)

    def make_ticker(config: EngineConfig, clock: Callable[[], float]) -> Ticker:
        return Controller(config, DecisionLog(config.controller.decisions_kept), clock)

    return VirtualEngine(machine, config, mode.rows, make_ticker).run(_feed(config, mode, jobs, is_open))


def saturated_tok_s(run: VirtualRun, mode: Mode) -> float:
    """As on the engine."""
    if mode.way is Way.STATIC:
        return sum(t.num_tokens for t in run.times) / run.duration_s
    return steady_tok_s(run.times)


def check_against_rounds(
    machine: VirtualMachine, config: EngineConfig, rounds: Sequence[Sequence[Round]]
) -> dict[str, Any]:
    """The measured rounds again: simulated over measured, minus one, the median of the rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for played in rounds:
        for one in played:
            saturated = simulate(machine, config, one.mode, one.saturated_jobs, is_open=False)
            swinging = simulate(machine, config, one.mode, one.open_jobs, is_open=True)
            figures = open_figures(swinging.times, swinging.duration_s, config.slo)
            figures["tok_s"] = saturated_tok_s(saturated, one.mode)
            errors = found.setdefault(one.mode.way.value, {})
            for key in ("tok_s", "p50_ms", "p99_ms", "p99_ttft_ms", "p99_itl_ms", "goodput"):
                if one.figures[key] > 0:
                    errors.setdefault(key, []).append(figures[key] / one.figures[key] - 1)
    return {
        way: {key: round(statistics.median(values), 4) for key, values in errors.items()}
        for way, errors in found.items()
    }


def steady_on_virtual_clock(
    machine: VirtualMachine,
    config: EngineConfig,
    modes: Sequence[Mode],
    work: Workload,
    num_requests: int,
    window_len: int,
) -> dict[str, Any]:
    """p99 by window at a steady load of the same share of capacity, capacity being that of the virtual clock."""
    num_capacity = min(num_requests, 3000)
    capacity_jobs = work.steady(num_capacity, 940)
    rates = {
        mode: saturated_tok_s(simulate(machine, config, mode, capacity_jobs, is_open=False), mode)
        for mode in modes
    }
    jobs = work.steady(num_requests, 941)
    load = work.rate * statistics.fmean(work.lengths.output)
    result: dict[str, Any] = {"load_tok_s": round(load, 1)}
    windows_by_way: dict[Way, list[float]] = {}
    for mode in modes:
        run = simulate(machine, config, mode, jobs, is_open=True)
        latencies = e2e_s(run.times)
        windows = window_p99(latencies, window_len)
        windows_by_way[mode.way] = windows
        result[mode.way.value] = {
            "capacity_tok_s": round(rates[mode], 1),
            "is_overloaded": load > _SATURATION_SHARE * rates[mode],
            "p99_swing": round(window_swing(windows) or 0.0, 4),
            "p99_swing_by_chance": round(chance_swing(latencies, window_len, repeats=40) or 0.0, 4),
            "p99_variation": round(statistics.pstdev(windows) / statistics.fmean(windows), 4),
            "num_windows": len(windows),
        } | open_figures(run.times, run.duration_s, config.slo)
    result["ratio_to_static"] = _swing_ratio(windows_by_way[Way.DYNAMIC], windows_by_way[Way.STATIC])
    return result


def swinging_on_virtual_clock(
    machine: VirtualMachine, config: EngineConfig, modes: Sequence[Mode], work: Workload, num_requests: int
) -> list[dict[str, Any]]:
    """Every mode on one swinging load; more single rungs than there is time for on the engine."""
    jobs = work.swinging(num_requests, 942)
    rows = []
    for mode in modes:
        run = simulate(machine, config, mode, jobs, is_open=True)
        rows.append({"mode": mode.label} | open_figures(run.times, run.duration_s, config.slo))
    return rows


def _swing_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """Distances of the windows from their median, ours over theirs, window by window as the load is the same."""
    middle_ours, middle_theirs = statistics.median(ours), statistics.median(theirs)
    pairs = [
        (abs(a / middle_ours - 1), abs(b / middle_theirs - 1)) for a, b in zip(ours, theirs, strict=True)
    ]
    ratios = [a / b for a, b in pairs if b > 0]
    return bootstrap_median(ratios).rounded() if ratios else None


def _feed(config: EngineConfig, mode: Mode, jobs: Sequence[Job], is_open: bool) -> Feed:
    if mode.way is Way.STATIC:
        assert mode.rows is not None
        return StaticFeed(jobs, mode.rows, mode.timeout_s, is_open=is_open)
    if is_open:
        return OpenFeed(jobs)
    return ClosedFeed(jobs, OPEN_PER_ROW * config.batch_processing.max_batch_size)
