"""Throughput of several ladders on one engine, in pairs: the ladder is swapped while the engine lives.

    python benchmarks/ladder_throughput.py TRACE [--rounds N] [--requests N] [--json FILE]

The queue is always full (closed loop), every ladder of a round plays the same requests, and the order turns round from
round to round. Each ladder's output tokens/s are set against the default ladder's of the same round.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from runtime.bench.adaptive_modes import OPEN_PER_ROW, changed
from runtime.bench.paired import abba_order, bootstrap_median, paired_ratios
from runtime.bench.replay import plan_requests, play_closed
from runtime.bench.report import machine_stamp, print_table, progress_bar, write_json
from runtime.bench.running import RunningEngine, open_engine
from runtime.bench.serving_metrics import padding_share
from runtime.bench.traces import fitting_factor, read_trace, scale_lengths
from runtime.config import EngineConfig, parse_config
from runtime.engine.change import LadderState
from runtime.ladder.ladder import BucketLadder

SWAP_TIMEOUT_S = 600.0
FINE_ROWS = (*range(1, 17), *range(18, 33, 2))
FINE_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512)
LADDERS: dict[str, dict[str, tuple[int, ...]]] = {
    "default": {},
    "powers of two": {"decode_rows": (1, 2, 4, 8, 16, 32), "prefill_tokens": (16, 32, 64, 128, 256, 512)},
    "fine": {"decode_rows": FINE_ROWS, "prefill_tokens": FINE_TOKENS},
}


def with_ladder(config: EngineConfig, name: str) -> EngineConfig:
    lists = {"decode_rows": (), "prefill_tokens": ()} | LADDERS[name]
    return changed(config, {f"ladder.{key}": list(sizes) for key, sizes in lists.items()})


def swap(engine: RunningEngine, name: str) -> None:
    """Until the ladder serves."""
    engine.loop.configure(with_ladder(engine.config, name)).result(SWAP_TIMEOUT_S)
    end_s = time.monotonic() + SWAP_TIMEOUT_S
    while (change := engine.snapshot().ladder_change).state is LadderState.COMPILING:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the ladder {name!r} is not ready after {SWAP_TIMEOUT_S:g} s")
        time.sleep(0.1)
    if change.state is LadderState.FAILED:
        raise RuntimeError(f"the ladder {name!r}: {change.error}")


def measure(engine: RunningEngine, trace: Path, num_requests: int, num_rounds: int) -> dict[str, Any]:
    """Every ladder once a round."""
    recorded = read_trace(trace, num_requests)
    factor = fitting_factor(recorded, engine.max_context)
    requests = scale_lengths(recorded, factor, engine.max_context)
    tok_s: dict[str, list[float]] = {name: [] for name in LADDERS}
    padding: dict[str, list[tuple[float, float]]] = {name: [] for name in LADDERS}
    num_open = OPEN_PER_ROW * engine.config.batch_processing.max_batch_size
    with progress_bar() as progress:
        for name in LADDERS:  # compiled once before; later swaps load from the persistent cache
            swap(engine, name)
        for number, names in enumerate(abba_order(list(LADDERS), num_rounds)):
            plans = plan_requests(requests, engine.shape.vocab_size, factor, 1000 + number)
            for name in names:
                swap(engine, name)
                played = play_closed(engine, plans, num_open, f"{name} {number}", progress)
                tok_s[name].append(sum(t.num_tokens for t in played.times) / played.duration_s)
                padding[name].append(
                    (padding_share(played, "prefill") or 0.0, padding_share(played, "decode") or 0.0)
                )
    rows = {
        name: {
            "rungs": len(
                BucketLadder.from_config(with_ladder(engine.config, name), engine.max_context).rungs
            ),
            "tok_s": [round(v, 1) for v in tok_s[name]],
            "median_tok_s": round(median(tok_s[name]), 1),
            "over_default": bootstrap_median(paired_ratios(tok_s[name], tok_s["default"])).rounded(),
            "padding_prefill": round(median(p for p, _ in padding[name]), 4),
            "padding_decode": round(median(d for _, d in padding[name]), 4),
        }
        for name in LADDERS
    }
    return {
        "trace": trace.name,
        "requests": len(requests),
        "length_scale": round(factor, 5),
        "rounds": num_rounds,
        "ladders": rows,
        "late_compiles": engine.snapshot().late_compiles,
        "model": engine.model_name,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    config = parse_config(
        {
            "server": {"max_queued_requests": 1 << 16, "max_queued_tokens": 1 << 30, "queue_timeout": "24h"},
            "kv_cache": {"enable_prefix_cache": False},
            "batch_processing": {"enable_dynamic_batch": False},
        }
    )
    with open_engine(config) as engine:
        result = measure(engine, args.trace, args.requests, args.rounds) | {"machine": machine_stamp()}
    columns = (
        "ladder",
        "rungs",
        "output tokens/s",
        "over default",
        "low",
        "high",
        "padding % prefill",
        "decode",
    )
    print_table(
        f"closed loop, {result['requests']} requests of {result['trace']}, {args.rounds} rounds",
        columns,
        [
            (
                name, row["rungs"], row["median_tok_s"], *row["over_default"].values(),
                100 * row["padding_prefill"], 100 * row["padding_decode"],
            )
            for name, row in result["ladders"].items()
        ],
    )  # fmt: skip
    if args.json:
        write_json(args.json, result)
    return 1 if result["late_compiles"] else 0


if __name__ == "__main__":
    sys.exit(main())
