"""Engines on several virtual devices for tests: their start, requests of many lengths, placements drawn at random."""

from typing import Any

import numpy as np

from runtime.experts.moves import plan_moves
from runtime.experts.placement import ExpertPlacement, Move
from runtime.request import Request
from tests.engine_driver import EngineDriver, request

PROMPTS = [np.random.RandomState(i).randint(0, 128, 3 + i * 37 % 50).tolist() for i in range(64)]
SMALL = {"decode_rows": [8], "prefill_tokens": [64], "max_decode_steps": 4}


def start(shards: int = 1, tensor: int = 1, **parallel: Any) -> EngineDriver:
    sizes = {"expert_parallel_size": shards, "tensor_parallel_size": tensor}
    return EngineDriver(parallel=sizes | parallel, ladder=SMALL, batch_processing={"max_batch_size": 8})


def batch(tag: str, num: int = 8, **params: Any) -> list[Request]:
    return [request(f"{tag}-{i}", p, **({"max_tokens": 12} | params)) for i, p in enumerate(PROMPTS[:num])]


def random_placement(rng: np.random.Generator, like: ExpertPlacement) -> ExpertPlacement:
    """Experts in random order, the spare slots filled with experts that the device does not hold."""
    rows = []
    for _ in range(like.num_layers):
        order = rng.permutation(like.num_experts)
        for part in np.array_split(order, like.num_devices):
            others = [e for e in rng.permutation(like.num_experts) if e not in part]
            rows.append([*part, *others[: like.slots_per_device - len(part)]])
    return ExpertPlacement(np.reshape(rows, (like.num_layers, -1)), like.num_devices, like.num_experts)


def random_exchanges(rng: np.random.Generator, now: ExpertPlacement) -> list[Move]:
    """Two slots of each layer change places: what a plan avoids where every device has one slot, as devices are equal."""
    moves = []
    for layer, held in enumerate(now.slot_experts):
        to_slot, from_slot = rng.choice(now.num_slots, 2, replace=False).tolist()
        moves.append(Move(layer, to_slot, int(held[from_slot]), from_slot, is_exchange=True))
    return moves


def run_through_moves(
    driver: EngineDriver, requests: list[Request], num_orders: int, moves_a_turn: int = 4
) -> tuple[list[list[int]], int]:
    """(output ids of each request, orders given): one random placement after another while the requests run."""
    mover, rng, num_given = driver.mover, np.random.default_rng(0), 0
    assert mover is not None
    sequences = [driver.scheduler.add(r) for r in requests]
    while not driver.scheduler.is_idle:
        if not mover.num_waiting and num_given < num_orders:
            moves = plan_moves(mover.placement, random_placement(rng, mover.placement))
            mover.order(moves or random_exchanges(rng, mover.placement))
            num_given += 1
        mover.turn(moves_a_turn)
        driver.turn()
    return [s.output_ids for s in sequences], num_given
