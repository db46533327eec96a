"""Experts that sleep: hit rates of policies on recorded routing, and the real engine with part of its experts resident."""

import argparse
from pathlib import Path
from typing import Any

from runtime.bench.expert_loads import NUM_RECORDED_EXPERTS, add_routing_argument
from runtime.bench.report import console, machine_stamp, print_table
from runtime.bench.residency_replay import POLICIES, SETTINGS, SHARES, recorded_traffic, replay
from runtime.experts.residency import HALF_LIFE_STEPS

DECODE_ROWS = (4, 16, 64)
# PCIe 5.0 x16 between an H200 (SXM) and its host: 32 GT/s on 16 lanes, one direction, before the protocol's share.
BUS_BYTES_S = 63e9
# One expert of one layer in bfloat16: 3 matrices of hidden size x expert width.
EXPERTS_OF_MODELS = {"qwen3-30b-a3b": 3 * 2048 * 768 * 2, "deepseek-v3": 3 * 7168 * 2048 * 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_routing_argument(parser)
    parser.add_argument(
        "--rounds", type=int, default=8, help="of the engines, taking turns (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the engines' weights")
    parser.add_argument("--no-engine", action="store_true", help="replay only")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if not 1 <= args.rounds <= 1000:
        raise ValueError(f"--rounds must be in [1, 1000], not {args.rounds}")
    found = [
        replay(traffic, round(share * NUM_RECORDED_EXPERTS))
        for traffic in recorded_traffic(args.routing, DECODE_ROWS)
        for share in SHARES
    ]
    engine = None if args.no_engine else _engine(args.rounds, args.dtype)
    result = {
        "machine": machine_stamp(),
        "settings": {
            "routing": "excerpt" if args.routing is None else "token-wise files",
            "experts": NUM_RECORDED_EXPERTS,
            "half_life_steps": HALF_LIFE_STEPS,
            "wake_margin": SETTINGS.wake_margin,
            "not_run_on_a_gpu": True,
            "host_and_device_are_one_memory": True,
        },
        "replay": found,
        "engine": engine,
        "late_compiles": engine["late_compiles"] if engine else 0,
        "bound_h200": {
            "bus_bytes_s": BUS_BYTES_S,
            "bus": "PCIe 5.0 x16, one direction, raw; computed, not measured",
            "expert_us": {
                name: round(1e6 * size / BUS_BYTES_S, 1) for name, size in EXPERTS_OF_MODELS.items()
            },
        },
    }
    _print(result)
    return result


def _engine(num_rounds: int, dtype: str) -> dict[str, Any]:
    from runtime.bench.residency_engine import measure  # noqa: PLC0415 - brings JAX, whose flags come first
    from runtime.bench.running import DEMO_MODEL  # noqa: PLC0415
    from runtime.xla_flags import set_xla_flags  # noqa: PLC0415

    set_xla_flags()
    console.print("engines, taking turns", highlight=False)
    return measure(Path(DEMO_MODEL), num_rounds, dtype)


def _print(result: dict[str, Any]) -> None:
    for figure, title in (
        ("hit_rate", "Rows whose expert was resident"),
        ("hit_rate_after_changes", "The same in the first 1,024 tokens after a change of task"),
        ("fetches_per_layer_step", "Fetches of a layer and step"),
    ):
        print_table(
            title,
            ("traffic, slots of 64", *POLICIES),
            [
                (f"{r['traffic']}, {r['slots']}", *(p[figure] for p in r["policies"].values()))
                for r in result["replay"]
            ],
        )
    if result["engine"] is None:
        return
    print_table(
        f"{result['engine']['model']}, {result['engine']['experts']} experts, {result['engine']['dtype']}",
        (
            "variant",
            "tokens/s",
            "over all",
            "low",
            "high",
            "same text",
            "hit rate",
            "ahead used",
            "in vain",
            "late",
        ),
        [
            (
                v["name"],
                v["tokens_s"],
                *(round(v["speed_over_all"][key], 3) for key in ("median", "low", "high")),
                "yes" if v["same_text"] else f"{v['equal_tokens']:.2%}",
                *(v.get(k) for k in ("hit_rate", "prefetches_used", "prefetches_unused", "late_fetches")),
            )
            for v in result["engine"]["variants"]
        ],
    )
