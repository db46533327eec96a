"""Expert placement on recorded routing and synthetic loads: imbalance by policy and device count, after a shift, moves, plan
time; and the skew case through a real engine. Counts only: nothing here is a speed of serving."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.expert_affinity import nodes_of_tokens
from runtime.bench.expert_bound import critical_path_gain
from runtime.bench.expert_loads import (
    SYNTHETIC_EXPERTS,
    SYNTHETIC_STEP_TOKENS,
    SYNTHETIC_WINDOW_TOKENS,
    WINDOW_TOKENS,
    ZIPF,
    add_routing_argument,
    draw,
    read_recorded,
    zipf_rates,
)
from runtime.bench.expert_pairs import pair_quality
from runtime.bench.expert_replay import (
    CONFIDENCE,
    FULL_WEIGHT,
    held_out,
    replay_recorded,
    replay_synthetic,
)
from runtime.bench.expert_shift import PLAN_STEPS, replay_shift, skew_model
from runtime.bench.expert_traffic import replay_bursts
from runtime.bench.report import console, machine_stamp, print_table
from runtime.config import ParallelConfig
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.greedy_balancer import greedy_slots

RECORDED_SHAPES = ((4, 17), (8, 9), (16, 5), (32, 3))  # devices, slots each: one to spare on every device
SYNTHETIC_SHAPES = ((8, 33), (32, 9), (144, 2), (144, 3))
SKEW_DEVICES = 8
BURSTS = (1, 4, 16, 64, 256)  # requests of one task in a row
TRAFFIC_REQUESTS, TRAFFIC_SEEDS = 1500, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_routing_argument(parser)
    parser.add_argument("--seeds", type=int, default=10, help="of the synthetic loads (default %(default)s)")
    parser.add_argument(
        "--moves-per-step",
        type=int,
        default=ParallelConfig().moves_per_step,
        help="the engine's limit, after a shift (default %(default)s, the engine's)",
    )
    parser.add_argument("--repeats", type=int, default=50, help="of a timed plan (default %(default)s)")
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="npz of an engine: rows_without, rows_with [steps, ..., devices] of the same work, for critical_path_gain "
        "(default: the skew case is served on eight virtual devices)",
    )
    parser.add_argument("--no-engine", action="store_true", help="leave the skew case out")
    parser.add_argument(
        "--row-us", type=float, default=1.0, help="cost of a row, for the skew model (default %(default)s us)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name, largest in (("seeds", 1000), ("moves_per_step", 10**6), ("repeats", 10**4)):
        if not 1 <= getattr(args, name) <= largest:
            raise ValueError(
                f"--{name.replace('_', '-')} must be in [1, {largest}], not {getattr(args, name)}"
            )
    recorded_loads = read_recorded(args.routing)
    plan = time_plans(args.repeats)
    console.print("recorded routing", highlight=False)
    recorded = [replay_recorded(recorded_loads, *shape) for shape in RECORDED_SHAPES]
    held = [held_out(recorded_loads, 8, 9, block) for block in (1, 2, 4)]
    console.print("synthetic loads", highlight=False)
    synthetic = [replay_synthetic(*shape, args.seeds) for shape in SYNTHETIC_SHAPES]
    synthetic.append(replay_synthetic(32, 9, args.seeds, num_groups=8, num_nodes=4))
    pairs = pair_quality(144, args.seeds)
    shifts = [
        replay_shift(32, 9, args.seeds, moves, FULL_WEIGHT, num_steps, plan_steps)
        for moves, num_steps, plan_steps in (
            (
                args.moves_per_step,
                200,
                PLAN_STEPS,
            ),  # as the engine does; the others are what faster plans and moves would bring
            (args.moves_per_step, 50, 1),
            (8, 50, 1),
        )
    ]
    console.print("traffic through the scheduler", highlight=False)
    traffic = [
        replay_bursts(recorded_loads, 8, 9, burst, TRAFFIC_REQUESTS, TRAFFIC_SEEDS) for burst in BURSTS
    ]
    gain: dict[str, Any] = {"critical_path_gain": None}
    if args.rows is not None:
        gain = gain_of_rows(args.rows, args.row_us * 1e-6)
    elif not args.no_engine:
        console.print("the skew case through the engine", highlight=False)
        gain = gain_of_engine()
    result = {
        "machine": machine_stamp(),
        "settings": {
            "routing": "excerpt" if args.routing is None else "token-wise files",
            "recorded_window_tokens": WINDOW_TOKENS,
            "synthetic_window_tokens": SYNTHETIC_WINDOW_TOKENS,
            "synthetic_step_tokens": SYNTHETIC_STEP_TOKENS,
            "zipf": ZIPF,
            "seeds": args.seeds,
            "confidence": CONFIDENCE,
            "balance_weight_of_leaning": FULL_WEIGHT,
            "not_run_on_a_gpu": True,
        },
        **_figures(recorded, held, synthetic, shifts, plan, pairs),
        "together_on_nodes": None if args.routing is None else nodes_of_tokens(args.routing),
        **gain,
        "skew_model": skew_model(args.row_us * 1e-6),
        "plan": plan,
        "recorded": recorded,
        "held_out": held,
        "synthetic": synthetic,
        "shift": shifts,
        "traffic": traffic,
    }
    _print(result)
    return result


def gain_of_rows(path: Path, row_s: float) -> dict[str, Any]:
    """`critical_path_gain` of rows that an engine counted, and what else is known of them under `skew_engine`."""
    with np.load(path, allow_pickle=False) as file:
        missing = {"rows_without", "rows_with"} - set(file.files)
        if missing:
            raise ValueError(f"--rows {path.name} lacks {', '.join(sorted(missing))}")
        found = critical_path_gain(file["rows_without"], file["rows_with"], row_s)
    return {"critical_path_gain": found["critical_path_gain"], "skew_engine": found}


def gain_of_engine() -> dict[str, Any]:
    """The same from a process of its own, whose JAX sees eight devices. Raises RuntimeError with its last words."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={SKEW_DEVICES}".strip()
    command = [sys.executable, "-m", "runtime.bench.expert_skew", str(SKEW_DEVICES)]
    environment = os.environ | {"XLA_FLAGS": flags}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise RuntimeError(f"the skew case ended with status {ended.returncode}: {ended.stderr[-500:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return {"critical_path_gain": round(found["critical_path_gain"], 3), "skew_engine": found}


def time_plans(repeats: int) -> dict[str, Any]:
    """Milliseconds of one placement of 58 layers x 256 experts on 32 x 9 slots, beside the published algorithm, in turns."""
    loads = draw(
        np.random.default_rng(0), zipf_rates(np.random.default_rng(0)), SYNTHETIC_WINDOW_TOKENS
    ).astype(float)
    shape = SlotShape(SYNTHETIC_EXPERTS, 32, 9)
    own, published = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        balance(loads, shape)
        middle = time.perf_counter()
        greedy_slots(loads, 32, 9)
        own.append((middle - start) * 1e3)
        published.append((time.perf_counter() - middle) * 1e3)
    median = statistics.median(own)
    return {
        "layers": len(loads),
        "experts": SYNTHETIC_EXPERTS,
        "repeats": repeats,
        "own_ms": round(median, 2),
        "own_fastest_ms": round(min(own), 2),
        "own_slowest_ms": round(max(own), 2),
        "published_ms": round(statistics.median(published), 2),
        "ratio_to_published": round(median / statistics.median(published), 3),
        "published": "own implementation of the published greedy, vectorised over layers alike",
        "same_device_duplicates_published": _num_duplicates(greedy_slots(loads, 32, 9), 32),
        "same_device_duplicates": _num_duplicates(balance(loads, shape).slot_experts, 32),
    }


def _num_duplicates(slots: np.ndarray, num_devices: int) -> int:
    held = np.sort(slots.reshape(len(slots), num_devices, -1), axis=2)
    return int((held[..., 1:] == held[..., :-1]).sum())


def _figures(
    recorded: list[dict[str, Any]],
    held: list[dict[str, Any]],
    synthetic: list[dict[str, Any]],
    shifts: list[dict[str, Any]],
    plan: dict[str, Any],
    pairs: dict[str, Any],
) -> dict[str, Any]:
    """The headline figures, each with its target and whether it was met."""
    ep8 = next(r["policies"] for r in recorded if r["devices"] == 8)
    ep32, ep144 = (
        next(r["policies"] for r in synthetic if (r["devices"], r["slots_per_device"], r["nodes"]) == s)
        for s in ((32, 9, 1), (144, 2, 1))
    )
    over = {
        name: round(
            ep8[name]["mean"] - ep8["oracle_leaning" if name.endswith("leaning") else "oracle"]["mean"], 4
        )
        for name in (
            "published_greedy",
            "last_window",
            "predicted",
            "last_window_leaning",
            "predicted_leaning",
        )
    }
    bound = ep144["lower_bound"]["mean"]
    above = {
        name: round((1 + ep144[name]["mean"]) / (1 + bound) - 1, 4)
        for name in (
            "predicted",
            "predicted_unwidened",
            "predicted_leaning",
            "true_rates",
            "oracle",
            "oracle_leaning",
        )
    }
    shift = shifts[0]
    beats = {  # from counts alone, as the engine forecasts: it has no traffic keys
        str(row["windows_in_a_row"]): round(row["last_window"] - row["predicted"], 4) for row in held
    }
    figures = {
        "imbalance_ep8_over_oracle": over["predicted_leaning"],
        "imbalance_ep8_over_oracle_by_policy": over,
        "imbalance_ep32": ep32["predicted"]["mean"],
        "imbalance_ep144": ep144["predicted"]["mean"],
        "imbalance_ep144_lower_bound": bound,
        "imbalance_ep144_above_bound": above,
        "imbalance_ep144_pairs": pairs,
        "same_device_duplicates": plan["same_device_duplicates"],
        "after_shift_50_steps": shift["after_shift_50_steps"],
        "imbalance_of_a_step_ep8": {
            name: ep8[name]["mean"]
            for name in ("predicted_step", "predicted_step_leaning", "oracle_step", "oracle_step_leaning")
        },
        "plan_ms": plan["own_ms"],
        "plan_ratio_to_published": plan["ratio_to_published"],
        "predicted_below_last_window_by": beats,
    }
    targets = [
        ("imbalance_ep8_over_oracle", figures["imbalance_ep8_over_oracle"], 0.10),
        ("imbalance_ep32", figures["imbalance_ep32"], 0.10),
        ("imbalance_ep144_above_bound", above["predicted"], 0.01),
        ("imbalance_ep144_pairs.own_loads.plan_above_bound", pairs["own_loads"]["plan_above_bound"], 0.01),
        (
            "imbalance_ep144_pairs.next_window.plan_above_true_rates",
            pairs["next_window"]["plan_above_true_rates"],
            0.01,
        ),
        ("same_device_duplicates", figures["same_device_duplicates"], 0),
        ("after_shift_50_steps", figures["after_shift_50_steps"], 0.25),
        ("plan_ms", figures["plan_ms"], 10.0),
        ("last_window_over_predicted", -min(beats.values()), 0.0),
    ]
    return figures | {
        "targets": [{"name": n, "value": v, "at_most": t, "is_met": bool(v <= t)} for n, v, t in targets]
    }


def _print(result: dict[str, Any]) -> None:
    names = ("no_balancing", "published_greedy", "last_window", "predicted", "predicted_leaning", "oracle")
    print_table(
        f"Imbalance on recorded routing ({result['recorded'][0]['pairs_of_windows']} pairs of windows)",
        ("devices x slots", *names),
        [
            (f"{r['devices']} x {r['slots_per_device']}", *(r["policies"][name]["mean"] for name in names))
            for r in result["recorded"]
        ],
    )
    print_table(
        "Held-out halves of the tasks, taking turns",
        ("windows in a row", "last window", "predicted", "with keys", "oracle"),
        [
            (r["windows_in_a_row"], r["last_window"], r["predicted"], r["predicted_with_keys"], r["oracle"])
            for r in result["held_out"]
        ],
    )
    names = ("published_greedy", "last_window", "predicted", "true_rates", "oracle", "lower_bound")
    print_table(
        "Imbalance on synthetic loads",
        ("devices x slots", *names),
        [
            (
                f"{r['devices']} x {r['slots_per_device']}"
                + (f", {r['nodes']} nodes" if r["nodes"] > 1 else ""),
                *(r["policies"][name]["mean"] for name in names),
            )
            for r in result["synthetic"]
        ],
    )
    print_table(
        "10 % of experts change",
        ("moves a step", "steps a plan takes", "old placement", "after 10", "after 50", "after 200"),
        [
            (
                r["moves_per_step"],
                r["plan_takes_steps"],
                r["old_placement"],
                r["after_steps"]["10"],
                r["after_shift_50_steps"],
                r["after_steps"].get("200", ""),
            )
            for r in result["shift"]
        ],
    )
    names = ("last_window", "predicted", "predicted_with_keys")
    print_table(
        "Imbalance of windows of the scheduler's launches, 8 devices x 9 slots",
        ("requests of a task in a row", *names),
        [(r["requests_in_a_row"], *(r[name] for name in names)) for r in result["traffic"]],
    )
    print_table(
        "Targets",
        ("figure", "value", "at most", "met"),
        [(t["name"], t["value"], t["at_most"], "yes" if t["is_met"] else "no") for t in result["targets"]],
    )
