"""Which share of recorded routing would have found its expert resident, by policy. Imports no JAX.

Every policy is judged by what it held before the step, and learns of the step afterwards. What is counted: rows whose expert
was resident, and fetches, which are the distinct asleep experts that a step wants in a layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.expert_loads import NUM_RECORDED_EXPERTS, TASKS, WINDOW_TOKENS, read_ids, read_recorded
from runtime.experts.residency import Residency, ResidencySettings

SHARES = (0.25, 0.5, 0.75)  # of the experts that have a slot
SETTINGS = ResidencySettings(sleep_after_s=1e9)  # nothing sleeps for want of traffic: a step is a second here


@dataclass(frozen=True)
class Traffic:
    """counts: int [T, L, E], rows of each expert by step, task after task. first_of_task: where each begins."""

    name: str
    rows_per_step: int
    counts: np.ndarray
    first_of_task: tuple[int, ...]


# what is resident before each step, bool [L, E], for so many slots
type Policy = Callable[[Traffic, int], Iterator[np.ndarray]]


def recorded_traffic(routing: Path | None, rows: tuple[int, ...]) -> list[Traffic]:
    """The excerpt as it is: steps of 128 tokens in a row, as in prefill. From token-wise files also decode steps: so many
    streams of text side by side, a token of each. Raises ValueError or OSError for wrong files.
    """
    found = [_joined("prefill of 128 tokens", 128, list(read_recorded(routing).steps.values()))]
    if routing is not None:
        ids = [read_ids(routing / f"esft_routing_{task}.npz") for task in TASKS]
        for num in rows:
            found.append(_joined(f"decode of {num} rows", num, [side_by_side(one, num) for one in ids]))
    return found


def side_by_side(ids: np.ndarray, num_streams: int) -> np.ndarray:
    """Counts [T, L, E] of steps with one token of each stream; a stream is a part of the tokens [N, L, k] in a row."""
    length, num_layers = len(ids) // num_streams, ids.shape[1]
    steps = ids[: num_streams * length].reshape(num_streams, length, num_layers, -1).swapaxes(0, 1)
    place = np.arange(length)[:, None, None, None] * num_layers + np.arange(num_layers)[:, None]
    keys = steps.astype(np.int64) + NUM_RECORDED_EXPERTS * place
    counts = np.bincount(keys.ravel(), minlength=length * num_layers * NUM_RECORDED_EXPERTS)
    return counts.reshape(length, num_layers, NUM_RECORDED_EXPERTS)


def replay(traffic: Traffic, num_slots: int) -> dict[str, Any]:
    """Figures of every policy for so many slots of a layer."""
    window = max(1, WINDOW_TOKENS // traffic.rows_per_step)  # steps
    changes = traffic.first_of_task[1:]
    results = {}
    for name, policy in POLICIES.items():
        counts, swaps, before = traffic.counts, 0, None
        hit_rows, fetches = np.zeros(len(counts)), np.zeros(len(counts))
        for step, resident in enumerate(policy(traffic, num_slots)):
            hit_rows[step] = counts[step][resident].sum()
            fetches[step] = np.count_nonzero(counts[step][~resident])
            swaps += 0 if before is None else np.count_nonzero(resident & ~before)
            before = resident.copy()
        rows = counts.sum(axis=(1, 2))

        def rate(steps: slice, hit_rows: np.ndarray = hit_rows, rows: np.ndarray = rows) -> float:
            return round(float(hit_rows[steps].sum() / rows[steps].sum()), 4)

        def mean(rates: list[float]) -> float | None:
            return round(float(np.mean(rates)), 4) if rates else None

        layer_steps = counts.shape[0] * counts.shape[1]
        results[name] = {
            "hit_rate": rate(slice(window, None)),
            "hit_rate_before_changes": mean([rate(slice(c - window, c)) for c in changes]),
            "hit_rate_after_changes": mean([rate(slice(c, c + window)) for c in changes]),
            "fetches_per_layer_step": round(float(fetches[window:].sum() / layer_steps), 3),
            "swaps_per_layer_step": round(int(swaps) / layer_steps, 4),
        }
    return {"traffic": traffic.name, "slots": num_slots, "window_steps": window, "policies": results}


def _own(max_swaps: int) -> Policy:
    """The server's: demand that fades, a margin, at most so many swaps a step over all layers."""

    def run(traffic: Traffic, num_slots: int) -> Iterator[np.ndarray]:
        _, num_layers, num_experts = traffic.counts.shape
        residency = Residency(num_layers, num_experts, num_slots, start_s=0.0)
        settings = replace(SETTINGS, max_swaps=max_swaps)
        for step, counts in enumerate(traffic.counts):
            yield residency.slot_of_expert >= 0
            residency.observe(counts, 1, float(step))
            residency.decide(settings)

    return run


def _lru(traffic: Traffic, num_slots: int) -> Iterator[np.ndarray]:
    """Whatever was fetched takes the slot of what was wanted longest ago; of one step, the more rows the longer kept."""
    used = np.zeros(traffic.counts.shape[1:])
    resident = np.zeros(used.shape, bool)
    resident[:, :num_slots] = True
    for step, counts in enumerate(traffic.counts):
        yield resident
        used = np.where(counts > 0, step + 1 + counts / (counts.max() + 1), used)
        resident = _top(np.where(resident | (counts > 0), used, -1.0), num_slots)


def _static(traffic: Traffic, num_slots: int) -> Iterator[np.ndarray]:
    """The busiest of the first window, for ever; in that window the first experts."""
    window = max(1, WINDOW_TOKENS // traffic.rows_per_step)
    resident = np.zeros(traffic.counts.shape[1:], bool)
    resident[:, :num_slots] = True
    for step in range(len(traffic.counts)):
        if step == window:
            resident = _top(traffic.counts[:window].sum(axis=0), num_slots)
        yield resident


def _belady(traffic: Traffic, num_slots: int) -> Iterator[np.ndarray]:
    """Clairvoyant: of what is held or was just fetched, keep what is wanted soonest (Belady, IBM Systems Journal 1966).
    No policy that wakes only what was fetched has fewer fetches."""
    num_steps = len(traffic.counts)
    next_use = np.full(
        traffic.counts.shape, num_steps, np.int32
    )  # first step after this one that wants the expert
    for step in range(num_steps - 2, -1, -1):
        next_use[step] = np.where(traffic.counts[step + 1] > 0, step + 1, next_use[step + 1])
    resident = np.zeros(traffic.counts.shape[1:], bool)
    resident[:, :num_slots] = True
    for counts, soon in zip(traffic.counts, next_use, strict=True):
        yield resident
        resident = _top(np.where(resident | (counts > 0), num_steps - soon, -1), num_slots)


def _best_of_step(traffic: Traffic, num_slots: int) -> Iterator[np.ndarray]:
    """The busiest experts of the very step, as if swaps were free: no hit rate by rows is higher."""
    for counts in traffic.counts:
        yield _top(counts, num_slots)


POLICIES: dict[str, Policy] = {
    "static_first_window": _static,
    "lru": _lru,
    "own_4_swaps": _own(4),
    "own": _own(10**6),
    "clairvoyant": _belady,
    "best_of_step": _best_of_step,
}


def _top(values: np.ndarray, num: int) -> np.ndarray:
    """bool [L, E]: the `num` largest of each layer; equal ones in the order of their number."""
    best = np.argsort(-values, axis=1, kind="stable")[:, :num]
    found = np.zeros(values.shape, bool)
    np.put_along_axis(found, best, True, axis=1)
    return found


def _joined(name: str, rows: int, tasks: list[np.ndarray]) -> Traffic:
    first = np.cumsum([0, *map(len, tasks)])[:-1]
    return Traffic(name, rows, np.concatenate(tasks), tuple(first.tolist()))
