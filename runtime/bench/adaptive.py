"""`adaptive`: static batches, one fixed rung, and the controller, on one engine under a load that swings.

The engine is loaded once. Each rung is measured, promises are set by a stated rule, our capacity is found with the
queue always full, the best static setting and the best single rung are chosen from printed grids. Then pairs in ABBA
order: every mode plays the same requests, saturated (throughput) and on the swinging load (latency, goodput). Steady
load and many requests follow, the latter on a virtual clock, whose error against the engine is stated.
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from runtime.bench import running
from runtime.bench.adaptive_modes import DYNAMIC, OPEN_PER_ROW, Mode, ModePlayer, Way, changed
from runtime.bench.adaptive_report import SWING_TARGET, by_way, judge, medians, ratios_of, show
from runtime.bench.adaptive_rounds import (
    Round,
    Stage,
    Workload,
    choose_fixed,
    choose_static,
    play_rounds,
)
from runtime.bench.adaptive_traffic import PEAK, SHAPE_TEXT, Lengths, mean_shape, read_lengths
from runtime.bench.limits import MachineLimits, probe_apart
from runtime.bench.mode_figures import e2e_s
from runtime.bench.paired import chance_swing, window_p99, window_swing
from runtime.bench.report import console, machine_stamp, print_table, progress_bar
from runtime.bench.running import RunningEngine
from runtime.bench.step_times import SLO_TEXT, ceiling_tok_s, measure_step_times, scaled_to_run, slo_of
from runtime.bench.virtual import StepTimes, VirtualMachine
from runtime.bench.virtual_check import (
    check_against_rounds,
    steady_on_virtual_clock,
    swinging_on_virtual_clock,
)
from runtime.config import EngineConfig
from runtime.ladder.ladder import BucketLadder

MIN_PAIRS = 5
WINDOW_LEN = 500
QUICK_S, FULL_S = 450.0, 2400.0
_VIRTUAL_RESERVE_S = 45.0
_STEADY_SHARE = 0.15  # of the time left when the pairs begin
_GRID_SHARE = 0.25  # of the time left after the capacity is known


class Clock:
    """Seconds since the command began, against what it may take."""

    def __init__(self, total_s: float) -> None:
        self._start_s, self.total_s = time.monotonic(), total_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running.add_arguments(parser)
    parser.add_argument(
        "--quick", action="store_true", help=f"end within {QUICK_S / 60:g} minutes on 2 cores"
    )
    parser.add_argument("--minutes", type=float, help=f"time to take (default {FULL_S / 60:g})")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help=f"at least {MIN_PAIRS} (default)")
    parser.add_argument(
        "--trace", type=Path, help="take the lengths from this trace (default: bundled sample)"
    )
    parser.add_argument("--load", type=float, default=0.8, help="load as a share of our capacity")
    parser.add_argument(
        "--load-at",
        choices=("mean", "peak"),
        default="peak",
        help="what of the swinging load is at --load (default: its peak; at the mean, the peak overloads every mode)",
    )
    parser.add_argument("--days", type=int, default=1, help="days of the swinging load in each run")
    parser.add_argument("--fixed-rows", type=_numbers, default=(4, 8, 16, 32), help="single rungs to try")
    parser.add_argument("--static-rows", type=_numbers, default=(8, 16, 32), help="batch sizes to try")
    parser.add_argument("--static-timeouts-ms", type=_numbers, default=(20, 100), help="time-outs to try")
    parser.add_argument("--virtual-requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The command `adaptive`."""
    _check(args)
    clock = Clock(60 * args.minutes if args.minutes else QUICK_S if args.quick else FULL_S)
    # The modes play the same requests one after another.
    overrides = running.ENDLESS_QUEUE | {"kv_cache.enable_prefix_cache": False}
    config = running.config_of(args, overrides)
    limits = probe_apart()
    with running.open_engine(config, args.threads) as engine, progress_bar() as progress:
        result = measure(engine, limits, args, clock, progress)
    result |= {"machine": machine_stamp(), "limits": asdict(limits), "seconds": round(clock.spent_s, 1)}
    show(result)
    return result


def measure(
    engine: RunningEngine, limits: MachineLimits, args: argparse.Namespace, clock: Clock, progress: Progress
) -> dict[str, Any]:
    """Everything on a ready engine."""
    late_before = engine.snapshot().late_compiles
    ladder = BucketLadder.from_config(engine.config, engine.max_context)
    lengths = read_lengths(args.trace, engine.max_context)
    whole = progress.add_task("seconds of the whole run", total=clock.total_s)
    times, config = calibrate(engine, ladder, lengths, progress)
    progress.update(whole, completed=clock.spent_s)
    stage = Stage(ModePlayer(engine, config, progress), limits)

    capacity, work, times = find_capacity(stage, lengths, times, args)
    progress.update(whole, completed=clock.spent_s)
    static, fixed, grids = choose_others(stage, work, ladder, args, clock)
    progress.update(whole, completed=clock.spent_s)

    steady_s = _STEADY_SHARE * (clock.left_s - _VIRTUAL_RESERVE_S)
    rounds = play_rounds(
        stage,
        work,
        (static, fixed),
        args.pairs,
        lambda: clock.left_s - _VIRTUAL_RESERVE_S - steady_s,
        _closed_len(config),
    )
    progress.update(whole, completed=clock.spent_s)
    steady_work = replace(work, rate=work.rate * args.load / _mean_load(args))
    steady = steady_swing(stage, steady_work, clock.left_s - _VIRTUAL_RESERVE_S)
    progress.update(whole, completed=clock.spent_s)
    modes = (static, fixed, DYNAMIC)
    virtual = on_virtual_clock(engine, config, ladder, times, rounds, modes, work, args)

    ways = by_way(rounds)
    ratios = ratios_of(rounds)
    late = engine.snapshot().late_compiles - late_before
    result: dict[str, Any] = {
        "command": "adaptive",
        "model": engine.model_name,
        "pairs": len(rounds),
        "static": {"label": static.label} | medians(ways[static.way]) | {"grid": grids["static"]},
        "fixed": {"label": fixed.label} | medians(ways[fixed.way]) | {"grid": grids["fixed"]},
        "dynamic": {"label": DYNAMIC.label} | medians(ways[DYNAMIC.way]),
        "ratio": {name: interval.rounded() for name, interval in ratios.items()},
        "late_compiles": late,
        "slo": {"ttft_s": config.slo.ttft, "itl_s": config.slo.itl, "rule": SLO_TEXT},
        "load": _load(work, capacity, args) | {"ceiling_tok_s": round(ceiling_tok_s(times, lengths), 1)},
        "steady": steady,
        "virtual": virtual,
        "step_times": asdict(times),
        "config": engine.config_stamp() | {"slo": config.slo.model_dump(mode="json")},
    }
    _add_swings(result, steady)
    result["targets"] = judge(ratios, steady["p99_swing"], late)
    virtual_swing = virtual["steady"]["dynamic"]["p99_swing"]
    result["targets"]["p99_swing_on_virtual_clock"] = {
        "bound": "at most", "target": SWING_TARGET, "found": virtual_swing, "is_met": virtual_swing <= SWING_TARGET,
        "missed_by": round(max(0.0, virtual_swing - SWING_TARGET), 4),
    }  # fmt: skip
    return result


def calibrate(
    engine: RunningEngine, ladder: BucketLadder, lengths: Lengths, progress: Progress
) -> tuple[StepTimes, EngineConfig]:
    """Every rung's time, and the configuration with the promises that follow from them."""
    task = progress.add_task("time of each rung", total=4 * len(ladder.decode) + len(ladder.prefill))
    times = measure_step_times(engine, engine.config, ladder, lengths, lambda: progress.advance(task))
    progress.remove_task(task)
    slo = slo_of(times, ladder, lengths)
    console.print(
        f"promises: TTFT {1e3 * slo.ttft:g} ms, time per token {1e3 * slo.itl:g} ms ({SLO_TEXT})",
        highlight=False,
    )
    rows = [(f"decode {r}", 1e3 * a, 1e3 * b) for r, (a, b) in times.decode.items()]
    rows += [(f"prefill {t}", 1e3 * s, None) for t, s in times.prefill.items()]
    print_table("measured ms", ("rung", "launch", "step"), rows)
    return times, changed(engine.config, {f"slo.{name}": text for name, text in slo.model_dump().items()})


def find_capacity(
    stage: Stage, lengths: Lengths, times: StepTimes, args: argparse.Namespace
) -> tuple[float, Workload, StepTimes]:
    """Our output tokens/s with the queue always full, the second of two runs; the load and the step times that follow."""
    work = Workload(lengths, 1.0, args.days, args.seed)
    num = 2 * _closed_len(stage.player.config)
    stage.player.saturated(DYNAMIC, work.steady(num // 2, 920), 920)
    played, tok_s = stage.player.saturated(DYNAMIC, work.steady(num, 921), 921)
    requests_s = tok_s / (sum(lengths.output) / len(lengths.output))
    scaled = scaled_to_run(times, played)
    factor = scaled.prefill[min(times.prefill)] / times.prefill[min(times.prefill)]
    console.print(
        f"capacity {tok_s:.0f} output tokens/s, {requests_s:.1f} requests/s; busy {100 * played.busy_share:.0f} %; "
        f"steps took {factor:.2f} times as long as alone",
        highlight=False,
    )
    return tok_s, Workload(lengths, _mean_load(args) * requests_s, args.days, args.seed), scaled


def choose_others(
    stage: Stage, work: Workload, ladder: BucketLadder, args: argparse.Namespace, clock: Clock
) -> tuple[Mode, Mode, dict[str, list[dict[str, Any]]]]:
    """The best static setting and the best single rung, chosen on short runs."""
    rungs = {b.rows for b in ladder.decode}
    fixed_rows = [r for r in args.fixed_rows if r in rungs]
    static_rows = [r for r in args.static_rows if r in rungs]
    if not fixed_rows or not static_rows:
        raise ValueError(f"--fixed-rows and --static-rows: none is a decode rung; there are {sorted(rungs)}")
    num_runs = 2 * len(fixed_rows) + len(static_rows) + 2 * len(args.static_timeouts_ms)
    num = int(_GRID_SHARE * (clock.left_s - _VIRTUAL_RESERVE_S) / num_runs / 1.6 * work.rate)
    num = max(_closed_len(stage.player.config), num)
    timeouts_s = [t / 1e3 for t in args.static_timeouts_ms]
    static, static_grid = choose_static(stage, work, static_rows, timeouts_s, num)
    fixed, fixed_grid = choose_fixed(stage, work, fixed_rows, num)
    keys = ("tok_s", "p99_ms", "p99_ttft_ms", "p99_itl_ms", "goodput_share")
    rows = [
        (f"static {r['batch']}, {r.get('timeout_ms', 0):g} ms", *(r.get(k) for k in keys))
        for r in static_grid
    ]
    rows += [(f"fixed {r['rows']}", *(r.get(k) for k in keys)) for r in fixed_grid]
    print_table(f"grids, {num} requests each: {static.label}; {fixed.label}", ("mode", *keys), rows)
    return static, fixed, {"static": static_grid, "fixed": fixed_grid}


def steady_swing(stage: Stage, work: Workload, seconds: float) -> dict[str, Any]:
    """p99 of windows of WINDOW_LEN requests in a row at a steady load, the controller on."""
    num_windows = max(2, int(seconds * work.rate / WINDOW_LEN))  # one window could not swing
    jobs = work.steady(num_windows * WINDOW_LEN, 930)
    played = stage.player.open(DYNAMIC, jobs, 930)
    latencies = e2e_s(played.times)
    windows = window_p99(latencies, WINDOW_LEN)
    return {
        "windows_p99_ms": [round(1e3 * w, 2) for w in windows],
        "p99_swing": round(window_swing(windows) or 0.0, 4),
        "p99_swing_by_chance": round(chance_swing(latencies, WINDOW_LEN) or 0.0, 4),
        "meaning": "largest distance of a window's p99 from the median window's, as a share of it; by chance: the "
        "same latencies in random order",
    }


def on_virtual_clock(
    engine: RunningEngine,
    config: EngineConfig,
    ladder: BucketLadder,
    times: StepTimes,
    rounds: list[list[Round]],
    modes: tuple[Mode, ...],
    work: Workload,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The rounds again for the simulator's error, then many requests at a steady load."""
    snapshot = engine.snapshot()
    shape = engine.shape
    bytes_per_token = 2 * shape.num_layers * shape.kv_dim * (2 if config.model.dtype == "bf16" else 4)
    machine = VirtualMachine(ladder, times, engine.max_context, snapshot.num_pages, bytes_per_token)
    start_s = time.monotonic()
    error = check_against_rounds(machine, config, rounds)
    steady_work = replace(work, rate=work.rate * args.load / _mean_load(args))
    steady = steady_on_virtual_clock(machine, config, modes, steady_work, args.virtual_requests, WINDOW_LEN)
    fixed_modes = [Mode(Way.FIXED, b.rows) for b in ladder.decode if b.rows in args.fixed_rows]
    others = (modes[0], *fixed_modes, DYNAMIC)
    mean_rate = steady_work.rate
    loads = {"mean": mean_rate, "peak": mean_rate * mean_shape() / PEAK}
    swinging = {
        f"{at}_at_{args.load:g}_of_capacity": swinging_on_virtual_clock(
            machine, config, others, replace(work, rate=rate), args.virtual_requests // 10
        )
        for at, rate in loads.items()
    }
    return {
        "label": "simulated: the real scheduler and controller, measured times for the device",
        "requests": args.virtual_requests,
        "error_against_engine": error,
        "steady": steady,
        "swinging": swinging,
        "seconds": round(time.monotonic() - start_s, 1),
    }


def _load(work: Workload, capacity: float, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "capacity_tok_s": capacity,
        "share_of_capacity": round(_mean_load(args), 4),
        "peak_share_of_capacity": round(_mean_load(args) * PEAK / mean_shape(), 4),
        "requests_s": round(work.rate, 3),
        "shape": SHAPE_TEXT,
        "days_in_a_run": work.num_days,
        "length_scale": round(work.lengths.factor, 5),
        "trace": args.trace.name if args.trace else "bundled sample of the Azure conversation trace",
    }


def _add_swings(result: dict[str, Any], steady: dict[str, Any]) -> None:
    """Each mode's swing on the virtual clock; the ratio is that of dynamic over static there."""
    virtual = result["virtual"]["steady"]
    for way in ("static", "fixed", "dynamic"):
        result[way] |= {"p99_swing": virtual[way]["p99_swing"], "p99_swing_source": "virtual"}
    result["dynamic"]["p99_swing_measured"] = steady["p99_swing"]
    result["ratio"]["p99_swing"] = virtual["ratio_to_static"]


def _mean_load(args: argparse.Namespace) -> float:
    return args.load * mean_shape() / PEAK if args.load_at == "peak" else args.load


def _closed_len(config: EngineConfig) -> int:
    """Requests with which a closed queue is full for two thirds of the run."""
    return 3 * OPEN_PER_ROW * config.batch_processing.max_batch_size


def _check(args: argparse.Namespace) -> None:
    if args.pairs < MIN_PAIRS:
        raise ValueError(f"--pairs {args.pairs}: at least {MIN_PAIRS}")
    if not 0 < args.load <= 1.5:
        raise ValueError(f"--load {args.load:g}: above 0 and at most 1.5")
    if args.minutes is not None and not 3 <= args.minutes <= 24 * 60:
        raise ValueError(f"--minutes {args.minutes:g}: 3 to 1440")
    if not 1 <= args.days <= 100:
        raise ValueError(f"--days {args.days}: 1 to 100")
    if not 2 * WINDOW_LEN <= args.virtual_requests <= 1_000_000:
        raise ValueError(f"--virtual-requests {args.virtual_requests}: {2 * WINDOW_LEN} to 1000000")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        values = ()
    if not values or any(not 1 <= value <= 100_000 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1 to 100000, for example 8,16,32")
    return values
