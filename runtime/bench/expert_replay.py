"""Placements made from one window of traffic and judged on the next, never on what they were made from. Imports no JAX.

Imbalance is (max - mean) / mean of the tokens on the devices in the judged window, by layer. `_leaning`: where copies share
in every step by the rows of that step, as the engine's steps do (`runtime.experts.sharing`), but for whole rows, and the best
round of four is kept where the step keeps the last. By which rows is what the engine's default exchange knows: in recorded
steps of 128 tokens, which gather, those of all devices; in synthetic steps of 4,096 tokens each device shares its own, a part
of the step's counts drawn at random. `_step`: the mean over the window's steps of the imbalance of one step, which is what a
step waits for.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bench.expert_bound import lowest_top
from runtime.bench.expert_loads import (
    NUM_RECORDED_EXPERTS,
    SYNTHETIC_EXPERTS,
    SYNTHETIC_LAYERS,
    SYNTHETIC_STEP_TOKENS,
    SYNTHETIC_WINDOW_TOKENS,
    WINDOW_TOKENS,
    RecordedLoads,
    draw,
    zipf_rates,
)
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.greedy_balancer import greedy_slots
from runtime.experts.load_predictor import LoadPredictor, Prediction
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import STEP_ROUNDS, device_loads, imbalance, slot_shares

CONFIDENCE = 2.0  # standard errors of the forecast that count when copies are handed out
FULL_WEIGHT = 0.5  # expert_balance_weight
HISTORY_WINDOWS = 8
STEPS_PER_WINDOW = SYNTHETIC_WINDOW_TOKENS // SYNTHETIC_STEP_TOKENS
Windows = Sequence[tuple[str, np.ndarray]]  # (traffic key, counts [steps, L, E])


def replay_recorded(loads: RecordedLoads, num_devices: int, slots_per_device: int) -> dict[str, Any]:
    """Every policy on all pairs of consecutive windows, task after task, and what the change of task costs."""
    windows = loads.windows()
    shape = SlotShape(NUM_RECORDED_EXPERTS, num_devices, slots_per_device)
    policies = judge(windows, 1, shape, has_keys=False)
    is_change = np.array([a[0] != b[0] for a, b in itertools.pairwise(windows)])
    return {
        "devices": num_devices,
        "slots_per_device": slots_per_device,
        "pairs_of_windows": len(is_change),
        "changes_of_task": int(is_change.sum()),
        "leaning_by": "rows of all devices, as gather shares them",
        "policies": {name: _summary(found, is_change) for name, found in policies.items()},
    }


def held_out(loads: RecordedLoads, num_devices: int, slots_per_device: int, block: int) -> dict[str, Any]:
    """The first half of each task is history; the second halves are judged, tasks taking turns every `block` windows.

    With keys, callers say which task the next window is of; without, the predictor has only counts.
    """
    by_task: dict[str, list[tuple[str, np.ndarray]]] = {}
    for task, window in loads.windows():
        by_task.setdefault(task, []).append((task, window))
    half = min(map(len, by_task.values())) // 2
    history = [window for windows in by_task.values() for window in windows[:half]]
    judged = [
        window
        for first in range(half, 2 * half, block)
        for windows in by_task.values()
        for window in windows[first : min(first + block, 2 * half)]
    ]
    shape = SlotShape(NUM_RECORDED_EXPERTS, num_devices, slots_per_device)
    found = {keys: judge([*history, *judged], len(history), shape, has_keys=keys) for keys in (False, True)}
    return {
        "windows_in_a_row": block,
        "judged_windows": len(judged),
        "last_window": _mean(found[False]["last_window"]),
        "predicted": _mean(found[False]["predicted"]),
        "predicted_with_keys": _mean(found[True]["predicted"]),
        "oracle": _mean(found[False]["oracle"]),
    }


def judge(windows: Windows, first_judged: int, shape: SlotShape, has_keys: bool) -> dict[str, np.ndarray]:
    """Imbalance [pairs, L] of each policy, from window first_judged on."""
    num_layers = windows[0][1].shape[1]
    predictor = LoadPredictor(num_layers, shape.num_experts)
    even = ExpertPlacement.uniform(num_layers, shape.num_experts, shape.num_devices, shape.slots_per_device)
    found: dict[str, list[np.ndarray]] = {}
    for i, (key, steps) in enumerate(windows):
        mix = {key: float(WINDOW_TOKENS)} if has_keys else None
        prediction = predictor.predict(mix)
        if i >= first_judged:
            last = windows[i - 1][1].sum(axis=0).astype(float)
            judged = _judge_window(last, prediction, steps, even, shape)
            for name, value in judged.items():
                found.setdefault(name, []).append(value)
        predictor.observe(steps.sum(axis=0), mix)
    return {name: np.array(values) for name, values in found.items()}


def _judge_window(
    last: np.ndarray, prediction: Prediction, steps: np.ndarray, even: ExpertPlacement, shape: SlotShape
) -> dict[str, np.ndarray]:
    """Imbalance [L] of each policy in the window of `steps` [steps, L, E]; `last` [L, E] is the window before it."""
    window = steps.sum(axis=0).astype(float)
    from_last = balance(last, shape)
    predicted = balance(prediction.loads, shape, uncertainty=CONFIDENCE * prediction.uncertainty)
    oracle = balance(window, shape)
    greedy = greedy_slots(last, shape.num_devices, shape.slots_per_device)
    return {
        "no_balancing": imbalance(device_loads(even, window)),
        "published_greedy": imbalance(_loads_of_slots(greedy, window, shape)),
        **_equal_and_leaning("last_window", from_last, steps[:, None]),
        **_equal_and_leaning("predicted", predicted, steps[:, None]),
        **_equal_and_leaning("oracle", oracle, steps[:, None]),
    }


def by_source(steps: np.ndarray, num_devices: int, rng: np.random.Generator) -> np.ndarray:
    """[steps, devices, L, E]: the counts of steps [steps, L, E] by the device whose tokens they are, at random."""
    return np.moveaxis(rng.multinomial(steps, np.full(num_devices, 1 / num_devices)), -1, 1)


def loads_of_steps(placement: ExpertPlacement, parts: np.ndarray, weight: float) -> np.ndarray:
    """[steps, L, D]: loads of the devices where copies share in each step, each source's rows by that source's own.

    parts: counts [steps, sources, L, E]; one source where the rows of all devices are known.
    """
    if weight == 0:
        return np.array([device_loads(placement, step) for step in parts.sum(axis=1).astype(float)])
    num_layers, num_sources = placement.num_layers, parts.shape[1]
    wide = placement.only(
        list(range(num_layers)) * num_sources
    )  # every source's rows are layers of their own
    found = []
    for step in parts.astype(float):
        loads = step.reshape(num_sources * num_layers, -1)
        on_devices = device_loads(wide, loads, slot_shares(wide, loads, weight, STEP_ROUNDS))
        found.append(on_devices.reshape(num_sources, num_layers, -1).sum(axis=0))
    return np.array(found)


def imbalance_of_steps(by_step: np.ndarray) -> np.ndarray:
    """[L]: the mean over steps [steps, L, D] of each step's own imbalance."""
    return np.mean([imbalance(step) for step in by_step], axis=0)


def _equal_and_leaning(name: str, placement: ExpertPlacement, parts: np.ndarray) -> dict[str, np.ndarray]:
    """Imbalance [L] of a placement, see the module's first lines for the names. parts: [steps, sources, L, E]."""
    equal, leaning = (loads_of_steps(placement, parts, weight) for weight in (0.0, FULL_WEIGHT))
    return {
        name: imbalance(equal.sum(axis=0)),
        f"{name}_leaning": imbalance(leaning.sum(axis=0)),
        f"{name}_step": imbalance_of_steps(equal),
        f"{name}_step_leaning": imbalance_of_steps(leaning),
    }


def _loads_of_slots(slots: np.ndarray, loads: np.ndarray, shape: SlotShape) -> np.ndarray:
    """[L, D] for a bare slot table, which may hold an expert twice on a device."""
    rows = np.arange(len(slots))[:, None]
    copies = np.zeros(loads.shape)
    np.add.at(copies, (rows, slots), 1)
    return (
        np.take_along_axis(loads / copies, slots, axis=1)
        .reshape(len(slots), shape.num_devices, -1)
        .sum(axis=2)
    )


@dataclass(frozen=True, eq=False)
class SteadyTraffic:
    """Unchanging Zipf rates [L, E]; the last of the windows seen [L, E] and the forecast from all of them; the steps
    [steps, L, E] of the window that comes next."""

    rates: np.ndarray
    last: np.ndarray
    prediction: Prediction
    steps: np.ndarray

    @property
    def window(self) -> np.ndarray:
        return self.steps.sum(axis=0).astype(float)


def steady_traffic(seed: int) -> SteadyTraffic:
    """Eight windows seen, the ninth to be judged."""
    rng = np.random.default_rng(seed)
    rates = zipf_rates(rng)
    predictor = LoadPredictor(SYNTHETIC_LAYERS, SYNTHETIC_EXPERTS)
    last = np.zeros(rates.shape)
    for _ in range(HISTORY_WINDOWS):
        last = draw(rng, rates, SYNTHETIC_WINDOW_TOKENS).astype(float)
        predictor.observe(last)
    steps = np.array([draw(rng, rates, SYNTHETIC_STEP_TOKENS) for _ in range(STEPS_PER_WINDOW)])
    return SteadyTraffic(rates, last, predictor.predict(), steps)


def replay_synthetic(
    num_devices: int, slots_per_device: int, num_seeds: int, num_groups: int = 1, num_nodes: int = 1
) -> dict[str, Any]:
    """Unchanging Zipf loads: what sampling alone costs."""
    shape = SlotShape(SYNTHETIC_EXPERTS, num_devices, slots_per_device, num_groups, num_nodes)
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(num_seeds):
        traffic = steady_traffic(seed)
        rates, last, prediction = traffic.rates, traffic.last, traffic.prediction
        window = traffic.window
        parts = by_source(traffic.steps, num_devices, np.random.default_rng(seed))
        predicted = balance(prediction.loads, shape, uncertainty=CONFIDENCE * prediction.uncertainty)
        unwidened, from_last, known, oracle = (
            balance(loads, shape) for loads in (prediction.loads, last, rates, window)
        )
        mean = window.sum(axis=1) / num_devices
        values = {
            "published_greedy": imbalance(
                _loads_of_slots(
                    greedy_slots(last, num_devices, slots_per_device, num_groups, num_nodes), window, shape
                )
            ),
            "last_window": imbalance(device_loads(from_last, window)),
            "predicted_unwidened": imbalance(device_loads(unwidened, window)),
            **_equal_and_leaning("predicted", predicted, parts),
            "true_rates": imbalance(device_loads(known, window)),
            **_equal_and_leaning("oracle", oracle, parts),
            "lower_bound": lowest_top(window, num_devices, slots_per_device) / mean - 1,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {
        "devices": num_devices,
        "slots_per_device": slots_per_device,
        "nodes": num_nodes,
        "groups": num_groups,
        "seeds": num_seeds,
        "leaning_by": "own rows of each device, as all_to_all and ragged share them",
        "policies": {name: _summary(np.array(value)) for name, value in found.items()},
    }


def _summary(values: np.ndarray, is_change: np.ndarray | None = None) -> dict[str, float]:
    """Of imbalance [pairs, L]: the mean, and the layer with the highest mean over pairs."""
    found = {"mean": _mean(values), "worst_layer": round(float(values.mean(axis=0).max()), 4)}
    if is_change is not None:
        found["within_a_task"] = _mean(values[~is_change])
        found["at_a_change"] = _mean(values[is_change])
    return found


def _mean(values: np.ndarray) -> float:
    return round(float(values.mean()), 4)
