"""`trace`: replays a recorded workload against the engine and reports what its users would have seen.

`--time-scale X` plays X times as fast as recorded; `auto` first measures what the engine can take in a closed loop,
then looks for the scale at which the device is busy for `--target-busy` of the time. All lengths are multiplied by one
factor (`--length-scale`) so that they fit the model's context.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.progress import Progress

from runtime.bench import running
from runtime.bench.replay import Planned, Played, plan_requests, play_closed, play_open
from runtime.bench.report import console, machine_stamp, print_table, progress_bar
from runtime.bench.running import RunningEngine
from runtime.bench.serving_metrics import metric_rows, serving_metrics
from runtime.bench.traces import TraceRequest, fitting_factor, read_trace, scale_lengths

_BUSY_TOLERANCE = 0.03
_MAX_TRIALS = 6
_OPEN_PER_ROW = 2  # requests kept in the engine for each row while its capacity is measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running.add_arguments(parser)
    parser.add_argument("--trace", type=Path, required=True, help="azure *.csv.gz or mooncake *.jsonl.gz")
    parser.add_argument(
        "--time-scale", type=_scale, default=None, metavar="X", help="X times as fast, or auto (default)"
    )
    parser.add_argument(
        "--target-busy", type=float, default=0.8, help="share of the time for --time-scale auto"
    )
    parser.add_argument(
        "--length-scale", type=_scale, default=None, metavar="F", help="factor of all lengths, or auto"
    )
    parser.add_argument("--max-requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-capacity", action="store_true", help="skip the closed loop when the time scale is given"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The command `trace`."""
    if not 0 < args.target_busy < 1:
        raise ValueError(f"--target-busy {args.target_busy:g}: a share between 0 and 1")
    recorded = read_trace(args.trace, args.max_requests)
    with running.open_engine(running.config_of(args, running.ENDLESS_QUEUE), args.threads) as engine:
        factor = args.length_scale or fitting_factor(recorded, engine.max_context)
        requests = scale_lengths(recorded, factor, engine.max_context)
        result = measure(
            engine, requests, factor, args.time_scale, args.target_busy, args.seed, not args.no_capacity
        )
    result |= {"trace": args.trace.name, "machine": machine_stamp()}
    show(result)
    return result


def measure(
    engine: RunningEngine,
    requests: list[TraceRequest],
    length_scale: float,
    time_scale: float | None,
    target_busy: float,
    seed: int = 0,
    has_capacity: bool = True,
) -> dict[str, Any]:
    """Capacity, then the time scale if it is to be found, then the replay. Each run has prompts of its own."""
    with progress_bar() as progress:
        capacity = None
        if has_capacity or time_scale is None:
            plans = _plans(engine, requests, length_scale, seed)
            num_open = _OPEN_PER_ROW * engine.config.batch_processing.max_batch_size
            capacity = play_closed(engine, plans, num_open, "capacity", progress)
        if time_scale is None and capacity is not None:
            played, time_scale, trials = _search(
                engine, requests, length_scale, capacity, target_busy, seed, progress
            )
        else:
            time_scale = time_scale or 1.0
            played = play_open(
                engine, _plans(engine, requests, length_scale, seed + 1), time_scale, "replay", progress
            )
            trials = [(time_scale, played.busy_share)]
    result = {
        "command": "trace",
        "model": engine.model_name,
        "config": engine.config_stamp(),
        "first_rung_s": round(engine.first_rung_s, 2),
        "all_rungs_s": round(engine.all_rungs_s, 2),
        "length_scale": round(length_scale, 5),
        "time_scale": round(time_scale, 4),
        "trials": [{"time_scale": round(scale, 4), "busy_share": round(busy, 3)} for scale, busy in trials],
    }
    result |= serving_metrics(played, engine.config.slo)
    if capacity is not None:
        result["capacity"] = serving_metrics(capacity, engine.config.slo)
        result["load_of_capacity"] = round(played.tokens_s / capacity.tokens_s, 3)
    return result


def show(result: dict[str, Any]) -> None:
    title = (
        f"{result['trace']}: {result['finished']} of {result['requests']} requests on {result['model']}, "
        f"time x{result['time_scale']:g}, lengths x{result['length_scale']:g}"
    )
    print_table(title, ("", "mean", "p50", "p90", "p99", "n"), metric_rows(result))
    columns = ("rung", "launches", "real tokens", "computed", "padding %", "step ms")
    print_table("use of the rungs", columns, [_rung_row(rung) for rung in result["rungs"]])
    padding = result["padding"]
    capacity = result.get("capacity")
    print(
        f"throughput {result['output_tokens_s']} output tokens/s, {result['requests_s']} requests/s over "
        f"{result['duration_s']} s; goodput {result['goodput_requests_s']} requests/s "
        f"({_percent(result['goodput_share'])} within TTFT {result['slo']['ttft_s']:g} s "
        f"and TPOT {result['slo']['itl_s']:g} s)"
    )
    print(
        f"busy {_percent(result['busy_share'])}; padding: prefill {_percent(padding['prefill'])}, "
        f"decode {_percent(padding['decode'])}; late_compiles={result['late_compiles']}"
    )
    if capacity:
        print(
            f"capacity (closed loop) {capacity['output_tokens_s']} output tokens/s; the replay asked for "
            f"{_percent(result['load_of_capacity'])} of it; padding then: prefill "
            f"{_percent(capacity['padding']['prefill'])}, decode {_percent(capacity['padding']['decode'])}"
        )
    if result["not_finished"]:
        console.print(f"not finished: {result['not_finished']}", style="red")


def _search(
    engine: RunningEngine,
    requests: list[TraceRequest],
    length_scale: float,
    capacity: Played,
    target_busy: float,
    seed: int,
    progress: Progress,
) -> tuple[Played, float, list[tuple[float, float]]]:
    """Replays until the busy share is within the tolerance, or the closest of all trials.

    The first guess asks for `target_busy` of the capacity. A batching engine is busy for longer than that, since
    small batches are less efficient, so later guesses go between the nearest trials on both sides.
    """
    span_s = max(requests[-1].t_s - requests[0].t_s, 1e-6)
    scale = target_busy * span_s / capacity.duration_s
    trials: list[tuple[float, float]] = []
    best: tuple[float, Played, float] | None = None
    for trial in range(_MAX_TRIALS):
        plans = _plans(engine, requests, length_scale, seed + 1 + trial)
        played = play_open(engine, plans, scale, f"time x{scale:.3g}", progress)
        trials.append((scale, played.busy_share))
        error = abs(played.busy_share - target_busy)
        if best is None or error < best[0]:
            best = (error, played, scale)
        if error <= _BUSY_TOLERANCE:
            break
        scale = next_scale(trials, target_busy)
    assert best is not None
    return best[1], best[2], trials


def next_scale(trials: list[tuple[float, float]], target: float) -> float:
    """Between the nearest trials below and above the target, in proportion; beyond them by the ratio, at most twice."""
    below = max((t for t in trials if t[1] < target), default=None)
    above = min((t for t in trials if t[1] >= target), default=None)
    if below and above and above[0] > below[0] and above[1] > below[1]:
        share = (target - below[1]) / (above[1] - below[1])
        return below[0] + (above[0] - below[0]) * min(0.9, max(0.1, share))
    scale, busy = trials[-1]
    return scale * min(2.0, max(0.5, target / max(busy, 1e-3)))


def _plans(
    engine: RunningEngine, requests: list[TraceRequest], length_scale: float, seed: int
) -> list[Planned]:
    return plan_requests(requests, engine.shape.vocab_size, length_scale, seed)


def _rung_row(rung: dict[str, Any]) -> tuple[object, ...]:
    padding = None if rung["padding"] is None else round(100 * rung["padding"], 1)
    return (
        rung["name"],
        rung["hits"],
        rung["real_tokens"],
        rung["computed_tokens"],
        padding,
        rung["step_s"] * 1e3,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _scale(text: str) -> float | None:
    if text == "auto":
        return None
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0, or auto")
    return value
