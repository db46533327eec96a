"""How equal the attention work of a prefill's halves is on recorded lengths: cut in the middle, by work, with room to spare.

    python -m benchmarks.halves_balance TRACE [--window 1.0] [--shards 8] [--json FILE]

Requests of each window are dealt to the shards in turn and computed in chunks by the smallest rung that takes them. Times are
bounds for a layer of Qwen3-30B-A3B on eight H200 from shapes (`runtime.engine.overlap_times`), nothing is run: what stays
exposed of the two exchanges that have attention beside them, and what room above T / 2 costs, which every step pays.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pallas_kernels.arguments import seconds_between, whole_number_to
from runtime.bench.report import print_table
from runtime.bench.traces import read_trace
from runtime.engine.overlap_times import Machine

PAGE, RUNGS, MAX_ROWS = 64, (512, 1024, 2048, 4096, 8192), 8  # tokens and rows of one device
WIDTH, QUERY, KEY, TOP_K, NUM_DEVICES = 2048, 4096, 512, 8, 8  # Qwen3-30B-A3B
LINEAR_KEYS = WIDTH * (1 + KEY / QUERY)
Chunks = list[tuple[int, int]]  # (tokens, tokens before them)


def steps(path: Path, window_s: float, num_shards: int) -> Iterator[Chunks]:
    """What one shard computes in each step."""
    lines: dict[int, list[Chunks]] = {}
    for i, request in enumerate(read_trace(path)):
        shards = lines.setdefault(int(request.t_s / window_s), [[] for _ in range(num_shards)])
        shards[i % num_shards].append((request.prompt_len, 0))
    for shards in lines.values():
        for waiting in shards:
            while waiting:
                yield _next_step(waiting)


def _next_step(waiting: Chunks) -> Chunks:
    taken, room = [], RUNGS[-1]
    while waiting and room >= PAGE and len(taken) < MAX_ROWS:
        left, start = waiting.pop(0)
        num = min(left, room)
        taken.append((num, start))
        room -= _aligned(num)
        if num < left:
            waiting.insert(0, (left - num, start + num))
    return taken


def work(chunks: Chunks, cut: int) -> tuple[float, float]:
    """Keys attended to before and after the cut, linear parts counted as keys."""
    before, total, at = 0.0, 0.0, 0
    for num, start in chunks:
        first = min(max(cut - at, 0), num)
        before += first * (LINEAR_KEYS + start + first / 2)
        total += num * (LINEAR_KEYS + start + num / 2)
        at += _aligned(num)
    return before, total - before


def best_cut(chunks: Chunks, room: int) -> int:
    end = sum(_aligned(num) for num, _ in chunks)
    cuts = range(max(0, -(-(end - room) // PAGE) * PAGE), room + 1, PAGE)
    return min(cuts, key=lambda cut: abs(np.subtract(*work(chunks, cut))))


def measure(taken: list[Chunks]) -> dict[str, dict[str, float]]:
    machine, forms = Machine(), {}
    for name, is_by_work, spare in (
        ("middle", False, 0.0),
        ("by work", True, 0.0),
        ("by work, 1/8 more room", True, 0.125),
    ):
        differences, works, exposed, padding = [], [], 0.0, 0.0
        for chunks in taken:
            end = sum(_aligned(num) for num, _ in chunks)
            rung = next(r for r in RUNGS if r >= end)
            room = int(rung / 2 * (1 + spare)) // PAGE * PAGE
            cut = best_cut(chunks, room) if is_by_work else rung // 2
            halves = work(chunks, cut)
            differences.append(abs(halves[0] - halves[1]))
            works.append(sum(halves))
            sent = room * NUM_DEVICES * WIDTH * 2 * (NUM_DEVICES - 1) / NUM_DEVICES
            exchange_s = sent / machine.link_bytes_s + machine.launch_s
            projections_s = room * 2 * WIDTH * (QUERY + 2 * KEY) / machine.flops_s
            real = (min(cut, end), end - min(cut, end))
            for half, num in zip(halves, real, strict=True):
                core_s = max(0.0, half - LINEAR_KEYS * num) * 4 * QUERY / machine.flops_s
                exposed += max(0.0, exchange_s - projections_s - core_s)
            padding += 2 * (room - rung // 2) * 4 * WIDTH * (QUERY + KEY) / machine.flops_s
        forms[name] = {
            "imbalance": float(np.sum(differences) / np.sum(works)),
            "exposed_us_a_step": 1e6 * exposed / len(taken),
            "padding_us_a_step": 1e6 * padding / len(taken),
        }
    return forms


def _aligned(num: int) -> int:
    return -(-num // PAGE) * PAGE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.halves_balance")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--window", type=seconds_between(0.01), default=1.0, metavar="S")
    parser.add_argument("--shards", type=whole_number_to(64), default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    taken = list(steps(args.trace, args.window, args.shards))
    forms = measure(taken)
    rows = [(name, *(f"{value:.3f}" for value in form.values())) for name, form in forms.items()]
    title = f"Halves of {len(taken)} steps, {sum(len(c) for c in taken)} chunks; times modelled, a layer"
    print_table(title, ("cut", "imbalance", "exposed us a step", "padding us a step"), rows)
    if args.json:
        args.json.write_text(
            json.dumps({"steps": len(taken), "forms": forms}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
