"""Where experts sit, how evenly their devices compute, and what is about to move. Pure."""

from typing import Any

import numpy as np

from control_plane.console.view import View
from runtime.engine.expert_status import ExpertStatus, ForecastStatus
from runtime.engine.stats import EngineSnapshot

ONE_DEVICE = "all experts are on one device: there is nothing to place"
NO_MODEL = "the model is not loaded"
MAX_KEYS = 10  # of traffic, the largest


def placement(view: View) -> dict[str, Any]:
    """console_schemas.Placement."""
    if view.snapshot is None or view.snapshot.state == "loading":
        return {"available": False, "reason": NO_MODEL}
    status = view.snapshot.experts
    if status is None:
        return {"available": False, "reason": ONE_DEVICE if serves(view.snapshot) else NO_MODEL}
    copies, rows, figures = copies_of(status), _rows_of_span(view), view.devices
    began_s = figures.began_s
    return {
        "available": True,
        "num_devices": status.num_devices,
        "slots_per_device": status.slots_per_device,
        "num_copies": int((copies - 1).sum()),
        "copies": copies,
        "moves_in_flight": status.waiting_moves,
        "num_moved": status.applied_moves,
        "plan_age_s": max(0.0, view.now_s - began_s) if began_s is not None else None,
        "imbalance_now": 1 + status.imbalance if status.imbalance is not None else None,
        "imbalance_before": device_imbalance(figures.rows_before),
        "imbalance_after": device_imbalance(figures.rows_after),
        "device_loads_before": device_loads(figures.rows_before),
        "device_loads_after": device_loads(figures.rows_after),
        "device_tokens": rows.sum(axis=0) if rows is not None else [],
        "device_rows": rows if rows is not None else [],
        "is_paused": status.is_paused,
        "pinned_layers": status.pinned_layers,
        "why": status.reason,
        "alarm": status.alarm,
        "forecast": _forecast(status.forecast) if status.forecast is not None else None,
    }


def serves(snapshot: EngineSnapshot) -> bool:
    """Whether what it lacks is what its model lacks; a load that failed, or an engine that ended, has nothing at all."""
    return snapshot.state in ("ready", "draining")


def copies_of(status: ExpertStatus) -> np.ndarray:
    """int64 [L, E]: slots that hold each expert. Every expert has one, so the greatest number tells how many there are."""
    slots = np.asarray(status.slot_experts, np.int64)
    num_experts = int(slots.max()) + 1
    return np.stack([np.bincount(row, minlength=num_experts) for row in slots])


def device_imbalance(rows: np.ndarray | None) -> float | None:
    """Busiest device over the mean of rows [L, D], mean over the layers that computed anything; 1 is even."""
    if rows is None:
        return None
    seen = rows[rows.any(axis=1)]
    return float((seen.max(axis=1) / seen.mean(axis=1)).mean()) if len(seen) else None


def device_loads(rows: np.ndarray | None) -> list[float]:
    """By device: rows over the mean of the devices, all layers of [L, D] together. Empty where nothing was computed."""
    if rows is None or not rows.any():
        return []
    by_device = rows.sum(axis=0)
    return (by_device / by_device.mean()).tolist()


def _forecast(status: ForecastStatus) -> dict[str, Any]:
    shares = sorted(status.next_traffic.items(), key=lambda pair: -pair[1])
    return {
        "source": status.source,
        "errors": dict(status.errors),
        "next_traffic": dict(shares[:MAX_KEYS]),
        "num_keys": len(shares),
    }


def _rows_of_span(view: View) -> np.ndarray | None:
    """int64 [L, D] of the span; None before there are two looks."""
    found = [point.device_rows for point in view.experts if point.device_rows is not None]
    return found[-1] - found[0] if len(found) > 1 else None
