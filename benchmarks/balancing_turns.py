"""How long the balancing of experts holds up the engine's thread: every turn between two launches, timed.

    python -m benchmarks.balancing_turns [--weight 0] [--between 0.1] [--step-ms 25] [--windows 60] [--json FILE]

58 layers of 256 experts on 32 devices of 9 slots, synthetic Zipf traffic of which 10 % of the experts change now and then.
Balancing and mover are the engine's own, on a clock of their own; their arrays go to virtual devices of this machine's CPU,
weights go nowhere.
"""

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from runtime.adaptive.decision import DecisionLog
from runtime.bench.expert_loads import (
    SYNTHETIC_EXPERTS,
    SYNTHETIC_LAYERS,
    SYNTHETIC_STEP_TOKENS,
    SYNTHETIC_WINDOW_TOKENS,
    draw,
    shifted,
    zipf_rates,
)
from runtime.bench.report import machine_stamp, print_table, summary
from runtime.config import BatchProcessingConfig, parse_config
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import device_loads
from runtime.xla_flags import use_virtual_devices

DEVICES, SLOTS = 32, 9
PUT_DEVICES = 8  # virtual devices that arrays are put on
WINDOW_S = 0.5
SHIFT_EVERY = 10  # windows
SETTLING = 2  # windows that are not counted: first calls of everything
STEP_SHARE = 0.7  # of its target that a balanced step takes


class Arrays:
    """What the mover wants of an engine: tables and biases go to the devices as they do there."""

    forms = SimpleNamespace(choices={})  # the status shows them

    def __init__(self) -> None:
        import jax  # noqa: PLC0415 - must see its flags first
        from jax.sharding import NamedSharding, PartitionSpec  # noqa: PLC0415

        self._put, self._block = jax.device_put, jax.block_until_ready
        mesh = jax.make_mesh((PUT_DEVICES,), ("expert",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._last: dict[tuple[str, int], Any] = {}

    def measure_move(self) -> float:
        return 1e-6

    def move_experts(self, layer: int, source: Mapping[int, int], table: np.ndarray) -> None:
        pass

    def set_balance_weight(self, weight: float) -> None:
        pass

    def lean_router(self, layer: int, bias: np.ndarray) -> None:
        self._last["lean", layer] = self._put(bias, self._everywhere)

    def wait(self) -> None:
        self._block(list(self._last.values()))


def measure(num_windows: int, weight: float, between: float, step_s: float) -> dict[str, Any]:
    """Times of turns in milliseconds: those that did something, and the longest one of each window. step_s: of the clock."""
    use_virtual_devices(PUT_DEVICES)
    from runtime.engine.balancing import ExpertBalancing  # noqa: PLC0415 - brings JAX
    from runtime.engine.expert_mover import ExpertMover  # noqa: PLC0415

    rng = np.random.default_rng(0)
    rates = zipf_rates(rng)
    shape = SlotShape(SYNTHETIC_EXPERTS, DEVICES, SLOTS)
    start = balance(draw(rng, rates, SYNTHETIC_WINDOW_TOKENS), shape)
    arrays = Arrays()
    mover = ExpertMover(cast("Any", arrays), start)
    now = [0.0]
    decisions = DecisionLog(4096)
    batch_processing: dict[str, Any] = {
        "dynamic_adjust_window": f"{round(1e3 * WINDOW_S)}ms",
        "expert_balance_weight": weight,
        "expert_lean_between": between,
    }
    config = parse_config(
        {
            "parallel": {"expert_parallel_size": DEVICES, "redundant_experts": DEVICES, "moves_per_step": 2},
            "batch_processing": batch_processing,
        }
    )
    balancing = ExpertBalancing(config, mover, decisions, lambda: now[0])
    turns: list[list[float]] = []  # by window
    plans = [0]  # turns of each plan, the last one still being made
    gc.collect()
    for window in range(num_windows + SETTLING):
        if window % SHIFT_EVERY == SETTLING:
            rates = shifted(rng, rates, 0.1)
        counts = [draw(rng, rates, SYNTHETIC_STEP_TOKENS) for _ in range(4)]
        spent = []
        for i in range(round(WINDOW_S / step_s)):
            spent.append(_turn(balancing, mover.placement, now, counts[i % 4], step_s))
            if balancing.status().reason == "planning":
                plans[-1] += 1
            elif plans[-1]:
                plans.append(0)
        arrays.wait()
        turns += [spent] if window >= SETTLING else []
    reasons = Counter({reason: n for (name, reason), n in decisions.counts.items() if "expert" in name})
    every = [1e3 * t for window in turns for t in window]
    return {
        "settings": {
            "layers": SYNTHETIC_LAYERS,
            "experts": SYNTHETIC_EXPERTS,
            "devices": DEVICES,
            "slots_per_device": SLOTS,
            "windows": num_windows,
            "step_ms": 1e3 * step_s,
            "expert_balance_weight": weight,
            "expert_lean_between": between,
            "not_run_on_a_gpu": True,
        },
        "moves": mover.num_applied,
        "reasons": dict(reasons),
        "turn_ms": summary(every, digits=3) | {"max": round(max(every), 3)},
        "longest_of_window_ms": summary([1e3 * max(window) for window in turns], digits=3),
        "turns_of_a_plan": summary([float(n) for n in plans if n], digits=1),
        "turns_above_3_ms": sum(t > 3 for t in every),
        "all_of_window_ms": summary([1e3 * sum(window) for window in turns], digits=3),
    }


def _turn(
    balancing: Any, placement: ExpertPlacement, now: list[float], counts: np.ndarray, step_s: float
) -> float:
    """One step's rows are told, then the turn: its seconds."""
    rows = np.round(device_loads(placement, counts)).astype(np.int64)
    now[0] += step_s
    start = time.perf_counter()
    balancing.on_step(counts, rows, 1, step_s)
    balancing.turn(now[0], STEP_SHARE)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=60, help="counted (default %(default)s)")
    parser.add_argument(
        "--weight",
        type=float,
        default=BatchProcessingConfig().expert_balance_weight,
        help="expert_balance_weight (default %(default)s, the engine's)",
    )
    parser.add_argument(
        "--between", type=float, default=0.0, help="expert_lean_between (default %(default)s)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=25.0, help="length of a step, 1 to 500 (default %(default)s)"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not 1 <= args.windows <= 10_000:
        print(f"--windows must be in [1, 10000], not {args.windows}", file=sys.stderr)
        return 2
    if not 1 <= args.step_ms <= 500:
        print(f"--step-ms must be in [1, 500], not {args.step_ms}", file=sys.stderr)
        return 2
    result = {"machine": machine_stamp()} | measure(
        args.windows, args.weight, args.between, args.step_ms / 1e3
    )
    keys = ("turn_ms", "longest_of_window_ms", "all_of_window_ms")
    print(f"turns of a plan: {result['turns_of_a_plan']}")
    print_table(
        f"Turns of the balancing, ms; {result['moves']} moves, {result['turns_above_3_ms']} turns above 3 ms",
        ("", "p50", "p90", "p99"),
        [(key, *(result[key][p] for p in ("p50", "p90", "p99"))) for key in keys],
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
