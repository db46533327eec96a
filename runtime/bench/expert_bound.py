"""What no placement can beat, and what balancing was worth: bounds for the experts' benchmark. Imports no JAX."""

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from runtime.experts.balancer import choose_copies

ROUNDING = 1e-9  # a load of exactly twice the limit takes two copies
PAIR_TOLERANCE = 5e-4
PAIR_RANGE = 0.06  # how far above `lowest_top` the bound for pairs is looked for
INFEASIBLE = 2  # scipy's milp: no solution exists


def lowest_top(loads: np.ndarray, num_devices: int, slots_per_device: int) -> np.ndarray:
    """float64 [L]: a load that the heaviest device has at least, whatever the placement; copies share equally.

    Not below the mean, nor below the highest load per copy when copies are handed out best. Besides, a copy is not
    alone on its device. Let q be the load of the slots_per_device - 1 coldest experts, and a limit M be given. A copy
    of more than M - q needs at least one neighbour that is a copy made only to be light; one spare slot makes at most two
    of those. So within M an expert of load p takes, of the spare slots, the less of

        ceil(p / (M - q)) - 1                 copies that may have anything beside them
        (c - 1) + c / 2, c = ceil(p / M)      fewer copies with light neighbours

    and M cannot be held if that is more than there are. The bound is the smallest M that can, by bisection.
    """
    num_experts = loads.shape[1]
    num_spare = num_devices * slots_per_device - num_experts
    copies = choose_copies(loads, num_spare + num_experts, num_devices)
    low = np.maximum(loads.sum(axis=1) / num_devices, (loads / copies).max(axis=1))
    beside = np.sort(loads, axis=1)[:, : slots_per_device - 1].sum(axis=1)
    beside = np.where(beside <= low / 4, beside, 0)  # what the argument on light copies needs
    high = low + beside
    for _ in range(30):
        middle = (low + high) / 2
        free = np.ceil(loads / (middle - beside)[:, None] - ROUNDING) - 1
        tight = np.ceil(loads / middle[:, None] - ROUNDING)
        needed = np.minimum(free, tight - 1 + tight / 2).sum(axis=1)
        is_possible = needed <= num_spare
        low, high = np.where(is_possible, low, middle), np.where(is_possible, middle, high)
    return low


def lowest_pair(loads: np.ndarray, num_devices: int) -> np.ndarray:
    """float64 [L]: the same with two slots a device, closer than `lowest_top` and slower (a third of a second a layer).

    Two slots make a pair. Pairs of at most M exist if and only if no copy is above M and, for every t above M / 2, no more
    copies weigh t or more than weigh M - t or less, as each of the former needs one of the latter to itself. Both
    numbers are linear in (expert e has c copies), one variable for each e and c, so whether M can be held is an integer
    program; by bisection down to PAIR_TOLERANCE. That two copies of an expert may not share a device is left out,
    which can only lower the bound. It is solved in real numbers, where some more can be held: 0.1 % lower than in whole
    ones, ten times faster.
    """
    low = lowest_top(loads, num_devices, 2)
    for layer, of_experts in enumerate(loads):
        top = low[layer] * (1 + PAIR_RANGE)
        while top > low[layer] * (1 + PAIR_TOLERANCE):
            middle = (low[layer] + top) / 2
            if _can_hold(of_experts, middle, num_devices):
                top = middle
            else:
                low[layer] = middle
    return low


def _can_hold(loads: np.ndarray, limit: float, num_devices: int) -> bool:
    """Whether pairs of at most `limit` exist, or may exist where the solver gave up, for loads [E]."""
    needed = np.maximum(np.ceil(loads / limit - ROUNDING), 1).astype(int)
    num_left = 2 * num_devices - int(needed.sum())
    if num_left < 0:
        return False
    expert = np.repeat(
        np.arange(len(loads)), num_left + 1
    )  # of each variable; no expert can have more than all that is left
    copies = (needed[:, None] + np.arange(num_left + 1)).ravel()
    weight = loads[expert] / copies
    limits = np.unique(weight[weight > limit / 2])[:, None]
    is_heavy, is_partner = weight >= limits, weight <= (limit - limits) * (1 + ROUNDING)
    one_each = coo_array((np.ones(len(expert)), (expert, np.arange(len(expert)))), (len(loads), len(expert)))
    found = milp(
        np.zeros(len(expert)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(copies[None].astype(float), 0, 2 * num_devices),
            LinearConstraint(copies * (is_heavy.astype(float) - is_partner), -np.inf, 0),
        ],
        options={"time_limit": 20},
    )
    return found.status != INFEASIBLE


def critical_path_gain(rows_without: np.ndarray, rows_with: np.ndarray, row_s: float) -> dict[str, Any]:
    """What balancing took off the critical path: a model, not a measurement of time.

    rows_without, rows_with: [steps, ..., D] rows of each device, by step (and layer), of the same work without and with
    balancing. row_s: measured seconds a row costs on one device. The slowest device makes the step.
    """
    for name, rows in (("rows_without", rows_without), ("rows_with", rows_with)):
        if rows.ndim < 2 or rows.size == 0 or not np.isfinite(rows).all() or (rows < 0).any():
            raise ValueError(
                f"{name} must be finite, not negative [steps, ..., devices], not {list(rows.shape)}"
            )
    if not 0 < row_s < 1:
        raise ValueError(f"row_s must be in (0, 1), not {row_s}")
    if rows_without.sum() != rows_with.sum():
        raise ValueError(f"both must be the same work: {rows_without.sum()} and {rows_with.sum()} rows")
    without, with_ = (float(rows.max(axis=-1).sum()) for rows in (rows_without, rows_with))
    if with_ == 0:
        raise ValueError("no rows")
    bound = without / float(rows_without.mean(axis=-1).sum())
    return {
        "critical_path_gain": round(without / with_, 3),
        "bound": round(bound, 3),
        "part_of_bound": round(without / with_ / bound, 3),
        "without_s": without * row_s,
        "with_s": with_ * row_s,
        "row_s": row_s,
        "label": "modelled: largest rows of a device, summed over steps, times the cost of a row",
    }
