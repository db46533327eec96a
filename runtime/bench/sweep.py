"""`sweep`: batch sizes on this machine. Latency, tokens/s, utilisation and zones; prefill shapes; padding; warm-up.

Utilisation is work that cannot be avoided over what the machine was measured to do (`utilisation.py`), never
busy time. The machine's limits are taken again around every round, and a round's figures are set against its own.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.bench import running, sweep_plots, sweep_report
from runtime.bench.limits import MachineLimits, probe_apart
from runtime.bench.report import console, machine_stamp
from runtime.bench.roofline import load_shape
from runtime.bench.running import RunningEngine
from runtime.bench.sweep_measure import Round, measure_round
from runtime.bench.sweep_plan import clip_batches, make_plan, overrides_for
from runtime.bench.sweep_summary import add_recommendation, summarise
from runtime.bench.sweep_warmup import FirstDecode, FirstLaunch, first_decodes, first_launches

BATCHES = (1, 8, 32, 64, 128, 256)
ROUNDS, QUICK_ROUNDS, QUICK_OUTPUT = 5, 2, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running.add_arguments(parser)
    parser.add_argument("--batch", type=_numbers, default=BATCHES, help="batch sizes, e.g. 1,8,32")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of a row")
    parser.add_argument("--output", type=int, default=64, help="new tokens of a row in company of all others")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="figures are medians over rounds")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_OUTPUT} tokens"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots here")
    parser.add_argument(
        "--recommend", type=Path, metavar="FILE", help="write a configuration for this machine"
    )
    parser.add_argument("--read-gbps", type=float, help="memory limit of an accelerator, not probed here")
    parser.add_argument("--peak-gflops", type=float, help="matrix rate of an accelerator, not probed here")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The command `sweep`."""
    if args.plots:
        sweep_plots.require_matplotlib()  # before minutes of measuring
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    output_len = QUICK_OUTPUT if args.quick else args.output
    shape = load_shape(Path(args.model) if args.model else running.DEMO_MODEL)
    dtype = running.config_of(args, {}).model.dtype
    platform, memory_bytes = _device(args.threads)
    batches = clip_batches(args.batch, args.input, output_len, shape, memory_bytes, dtype)
    if len(batches) < len(args.batch):
        left_out = sorted(set(args.batch) - set(batches))
        console.print(f"left out for want of memory: batch {left_out}", style="yellow", highlight=False)
    plan = make_plan(batches, args.input, output_len, rounds, shape.max_context)
    config = running.config_of(args, overrides_for(plan, shape, dtype))
    probe = _probe_of(args, platform)

    launches = first_launches(config)
    limits = [probe()]
    measured: list[Round] = []
    with running.open_engine(config, args.threads) as engine:
        late_before = engine.snapshot().late_compiles
        decodes = first_decodes(engine, plan.batches)
        for index in range(plan.rounds):
            measured.append(measure_round(engine, plan, index))
            limits.append(probe())
        late_compiles = engine.snapshot().late_compiles - late_before
        max_context = engine.max_context
        result: dict[str, Any] = {
            "command": "sweep",
            "model": engine.model_name,
            "platform": platform,
        } | _stamp(engine)
    result |= summarise(plan, shape, config, measured, limits, max_context)
    result["warm_up"] = {
        "prefill": [_launch(x) for x in launches],
        "decode_after": [_decode(x) for x in decodes],
    }
    result |= {"late_compiles": late_compiles, "left_out": sorted(set(args.batch) - set(batches))}
    result |= {"machine": machine_stamp()}
    add_recommendation(result, config.slo.itl)
    sweep_report.show(result)
    if args.plots:
        for path in sweep_plots.draw(result, args.plots):
            console.print(f"written to {path}", highlight=False)
    if args.recommend:
        args.recommend.parent.mkdir(parents=True, exist_ok=True)
        args.recommend.write_text(result["recommended"]["yaml"], encoding="utf-8")
        console.print(f"written to {args.recommend}", highlight=False)
    return result


def _launch(launch: FirstLaunch) -> dict[str, Any]:
    return {
        "rung": launch.rung,
        "first_ms": round(launch.first_s * 1e3, 3),
        "later_ms": round(launch.later_s * 1e3, 3),
        "compile_s": round(launch.compile_s, 3),
        "is_from_cache": launch.is_from_cache,
    }


def _decode(first: FirstDecode) -> dict[str, Any]:
    return {
        "batch": first.batch,
        "first_ms": round(first.first_s * 1e3, 3),
        "later_ms": round(first.later_s * 1e3, 3),
    }


def _stamp(engine: RunningEngine) -> dict[str, Any]:
    return {"config": engine.config_stamp(), "all_rungs_s": round(engine.all_rungs_s, 2)}


def _device(threads: int | None) -> tuple[str, int]:
    """Platform of the default device and its free bytes; sets the cores first, as JAX sizes its threads by them."""
    if threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax  # noqa: PLC0415 - must see the cores set above

    from runtime.engine.build import device_memory_bytes  # noqa: PLC0415
    from runtime.xla_flags import set_xla_flags  # noqa: PLC0415

    set_xla_flags()  # read when the first device is asked for
    return jax.default_backend(), device_memory_bytes()


def _probe_of(args: argparse.Namespace, platform: str) -> Callable[[], MachineLimits | None]:
    """How limits are taken: given, probed on a CPU, or not at all on an accelerator, whose memory no probe reads."""
    if args.read_gbps:
        given = MachineLimits(args.read_gbps, args.peak_gflops or 0.0, args.peak_gflops or 0.0)
        return lambda: given
    if platform == "cpu":
        return probe_apart
    console.print("no utilisation: give --read-gbps and --peak-gflops of the accelerator", style="yellow")
    return lambda: None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        values = ()
    if not values or values[0] < 1 or values[-1] > 4096:
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1 to 4096, for example 1,8,32")
    return values
