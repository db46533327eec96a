"""What no placement can beat, and what balancing was worth: bounds for the experts' benchmark. Imports no JAX."""

from typing import Any

import numpy as np

from runtime.experts.balancer import choose_copies

ROUNDING = 1e-9  # a load of exactly twice the limit takes two copies


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
