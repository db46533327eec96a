"""What moves of experts cost the steps between which they happen: decode steps with and without forced rebalances, in turns.

One engine of several virtual devices under a steady load; stretches of steps with moves, `moves_per_step` before each, take
turns with stretches without. A step's time is that between two reads of results in the engine's thread. The devices share the
machine's cores, so times are of this machine only; both kinds of steps are.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bench.driven import drive, load
from runtime.bench.report import machine_stamp, percentile, print_table, spread_percent
from runtime.bench.running import DEMO_MODEL
from runtime.config import parse_config
from runtime.experts.move_order import transfers
from runtime.experts.moves import plan_moves, relabel
from runtime.experts.placement import ExpertPlacement, Move
from runtime.request import Request, SamplingParams
from runtime.xla_flags import use_virtual_devices

if TYPE_CHECKING:
    from runtime.engine.engine import CollectedStep
    from runtime.engine.expert_mover import ExpertMover
    from runtime.engine.loaded import Loaded

ROWS, PROMPT_LEN = 8, 16
STRETCH = 50  # steps before moves begin or end
SETTLING = 3  # first steps of a stretch: launches of the one before are among them
NUM_TIMED = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=4, help="virtual devices (default %(default)s)")
    parser.add_argument(
        "--moves-per-step", type=int, default=2, help="the engine's limit (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=8, help="p99 is taken of each (default %(default)s)")
    parser.add_argument(
        "--stretches",
        type=int,
        default=16,
        help=f"of {STRETCH} steps in a repeat, every second with moves (default %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    allowed = {"devices": (2, 8), "moves_per_step": (1, 64), "repeats": (1, 100), "stretches": (2, 36)}
    for name, (low, high) in allowed.items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(
                f"--{name.replace('_', '-')} must be in [{low}, {high}], not {getattr(args, name)}"
            )
    use_virtual_devices(args.devices)
    result = {"machine": machine_stamp()} | measure(
        args.devices, args.moves_per_step, args.repeats, args.stretches
    )
    _print(result)
    return result


class Stretches:
    """Moves experts in every second stretch, and keeps the times of full decode steps by whether experts moved."""

    def __init__(self, mover: "ExpertMover", moves: Sequence[Move], moves_per_step: int, top_k: int) -> None:
        mover.order(moves)
        self._mover, self._moves, self._moves_per_step = mover, moves, moves_per_step
        self._full = ROWS * top_k * mover.placement.num_layers  # (row, expert) pairs of a full decode step
        self._last_s: float | None = None
        self.num_full = 0
        self.times_s: dict[bool, list[float]] = {False: [], True: []}
        self.turns_s: list[float] = []  # the host's part of the moves of one step
        self._turns: list[int] = []  # moves that each turn made

    def before_launch(self) -> None:
        if self._are_moving:
            start = time.perf_counter()
            self._turns.append(self._mover.turn(self._moves_per_step))
            self.turns_s.append(time.perf_counter() - start)

    def after_read(self, collected: "CollectedStep") -> None:
        now, is_full = time.perf_counter(), int(collected.expert_tokens.sum()) == self._full
        if is_full:
            if self._last_s is not None and self.num_full % STRETCH >= SETTLING:
                self.times_s[self._are_moving].append(now - self._last_s)
            self.num_full += 1
        self._last_s = now if is_full else None

    def take(self) -> dict[bool, list[float]]:
        """The times since the last call."""
        times, self.times_s = self.times_s, {False: [], True: []}
        return times

    @property
    def transfers_per_step(self) -> float:
        """Transfers that a step with moves paid, on average: two moves of a layer are one."""
        return num_transfers(self._moves, self._turns) / len(self._turns)

    @property
    def _are_moving(self) -> bool:
        return self.num_full // STRETCH % 2 == 1


def measure(num_devices: int, moves_per_step: int, repeats: int, stretches: int) -> dict[str, Any]:
    """All figures. Needs as many devices as `num_devices`: XLA_FLAGS are read before JAX makes its first array."""
    loaded, top_k = _load(num_devices, moves_per_step)
    mover, steps_of_repeat = loaded.mover, stretches * STRETCH
    assert mover is not None
    moves, plans_s = plan_chain(mover.placement, moves_per_step * (repeats + 1) * steps_of_repeat)
    loaded.engine.compiler.wait_settled()
    gc.collect()
    gc.freeze()  # as the server does
    steps, rounds = Stretches(mover, moves, moves_per_step, top_k), list[dict[bool, list[float]]]()
    for collected in drive(loaded, _requests(repeats, steps_of_repeat), between=steps.before_launch):
        steps.after_read(collected)
        if steps.num_full == (len(rounds) + 1) * steps_of_repeat:
            rounds.append(steps.take())
    gc.unfreeze()
    copies_s = [loaded.engine.measure_move() for _ in range(NUM_TIMED)]
    alone_s = [_turn_alone(loaded, moves_per_step) for _ in range(NUM_TIMED)]
    return {
        "settings": {
            "model": "demo-moe, fp32",
            "devices": num_devices,
            "rows": ROWS,
            "moves_per_step": moves_per_step,
            "repeats": repeats,
            "steps_of_repeat": steps_of_repeat,
            "not_run_on_a_gpu": True,
        },
        "moves": mover.num_applied,
        "plan_ms": round(1e3 * statistics.median(plans_s), 3),
        "host_turn_ms": round(1e3 * statistics.median(steps.turns_s), 3),
        "moves_alone_ms": round(1e3 * statistics.median(alone_s), 3),
    } | figures(rounds, copies_s, steps.transfers_per_step)


def _turn_alone(loaded: "Loaded", moves_per_step: int) -> float:
    """Seconds that the moves of one step take on idle devices: weights, tables and the host's part."""
    assert loaded.mover is not None
    loaded.engine.wait_idle()
    start = time.perf_counter()
    loaded.mover.turn(moves_per_step)
    loaded.engine.wait_idle()
    return time.perf_counter() - start


def figures(
    rounds: Sequence[dict[bool, list[float]]], copies_s: Sequence[float], transfers_per_step: float
) -> dict[str, Any]:
    """p99 of a step in each repeat, without and with moves, beside what the copies of a step take.

    copies_s: measured, of one transfer each. transfers_per_step: in a step with moves.

    is_met: the median of the differences is at most the measured time of the copies of one step.
    """
    p99 = {
        moved: [1e3 * (percentile(times[moved], 99) or 0.0) for times in rounds] for moved in (False, True)
    }
    excess = [a - b for a, b in zip(p99[True], p99[False], strict=True)]
    copy_ms = 1e3 * transfers_per_step * statistics.median(copies_s)
    result: dict[str, Any] = {}
    for moved, name in ((False, "without"), (True, "with")):
        times = [1e3 * t for repeat in rounds for t in repeat[moved]]
        result |= {
            f"steps_{name}": len(times),
            f"median_{name}_ms": round(statistics.median(times), 3),
            f"p99_{name}_ms": round(statistics.median(p99[moved]), 3),
            f"p99_{name}_spread_percent": round(spread_percent(p99[moved]), 1),
            f"p99_{name}_each_ms": [round(v, 3) for v in p99[moved]],
        }
    return result | {
        "transfers_per_step": round(transfers_per_step, 3),
        "copy_ms": round(copy_ms, 3),
        "p99_excess_ms": round(statistics.median(excess), 3),
        "p99_excess_each_ms": [round(v, 3) for v in excess],
        "median_excess_ms": round(result["median_with_ms"] - result["median_without_ms"], 3),
        "repeats_met": sum(each <= copy_ms for each in excess),
        "is_met": statistics.median(excess) <= copy_ms,
    }


def num_transfers(moves: Sequence[Move], turns: Sequence[int]) -> int:
    """Transfers that turns of so many moves each, from the first on, are made of."""
    ends = list(itertools.accumulate(turns))
    return sum(
        sum(1 for _ in transfers(moves[end - turn : end])) for turn, end in zip(turns, ends, strict=True)
    )


def plan_chain(start: ExpertPlacement, num_moves: int) -> tuple[list[Move], list[float]]:
    """(moves from one random placement to the next, at least so many, seconds of each plan): planned beforehand, as a
    controller's plan is not part of a move."""
    rng, now = np.random.default_rng(0), start
    moves: list[Move] = []
    plans_s: list[float] = []
    while len(moves) < num_moves:
        target = _random_placement(rng, now)
        began = time.perf_counter()
        moves += plan_moves(now, target)
        plans_s.append(time.perf_counter() - began)
        now = relabel(now, target)
    return moves, plans_s


def _random_placement(rng: np.random.Generator, like: ExpertPlacement) -> ExpertPlacement:
    """Experts in random order, spare slots filled with experts that the device does not hold."""
    layers = []
    for _ in range(like.num_layers):
        for part in np.array_split(rng.permutation(like.num_experts), like.num_devices):
            others = [e for e in rng.permutation(like.num_experts) if e not in part]
            layers += [*part, *others[: like.slots_per_device - len(part)]]
    return ExpertPlacement(np.reshape(layers, (like.num_layers, -1)), like.num_devices, like.num_experts)


def _load(num_devices: int, moves_per_step: int) -> tuple["Loaded", int]:
    config = parse_config(
        {
            "model": {"dtype": "fp32"},
            "kv_cache": {"kv_cache_size": "64MiB", "enable_prefix_cache": False},
            "ladder": {
                "decode_rows": [ROWS],
                "prefill_tokens": [256],
                "max_decode_steps": 1,
                "cache_dir": "off",
            },
            "batch_processing": {"max_batch_size": ROWS, "base_batch_size": ROWS},
            "parallel": {
                "expert_parallel_size": num_devices,
                "redundant_experts": num_devices,
                "moves_per_step": moves_per_step,
            },
        }
    )
    loaded = load(config, DEMO_MODEL)
    loaded.engine.set_max_decode_steps(1)
    return loaded, loaded.engine.arch.top_k


def _requests(repeats: int, steps_of_repeat: int) -> list[Request]:
    """Rows that begin and end together, for each repeat."""
    rng, params = np.random.default_rng(1), SamplingParams
    return [
        Request(
            f"load-{i}",
            tuple(rng.integers(0, 4096, PROMPT_LEN).tolist()),
            params(max_tokens=steps_of_repeat + 1, temperature=0.0, ignore_eos=True),
        )
        for i in range(ROWS * repeats)
    ]


def _print(result: dict[str, Any]) -> None:
    columns = ("steps", "median ms", "p99 ms", "spread of p99 %")
    keys = ("steps_{}", "median_{}_ms", "p99_{}_ms", "p99_{}_spread_percent")
    print_table(
        f"Decode steps; copies of a step {result['copy_ms']} ms, p99 excess {result['p99_excess_ms']} ms: "
        f"{'met' if result['is_met'] else 'missed'}",
        ("moves", *columns),
        [(name, *(result[key.format(name)] for key in keys)) for name in ("without", "with")],
    )
