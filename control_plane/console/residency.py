"""Experts that sleep: which are resident, and what that cost and saved of late. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from control_plane.console.history import ExpertPoint
from control_plane.console.lines import Series, ratio, series
from control_plane.console.placement import NO_MODEL, serves
from control_plane.console.view import View
from runtime.engine.expert_status import ResidencyStatus
from runtime.experts.residency import ResidencyReason

ALL_RESIDENT = "all experts are resident: none sleeps"
FETCHES = ("late_fetches", "prefetches_used", "prefetches_unused")
CHANGES = (ResidencyReason.WOKE, ResidencyReason.EVICTED, ResidencyReason.SLEPT)  # what moved


@dataclass(frozen=True, slots=True)
class Growth:
    """What the totals of residency grew by from one look to another, the same look where there is only one."""

    before: ResidencyStatus
    after: ResidencyStatus

    def total(self, name: str) -> int:
        return getattr(self.after, name) - getattr(self.before, name)

    def changes(self, reason: ResidencyReason) -> int:
        return self.after.changes[reason.value] - self.before.changes[reason.value]

    def a_step(self, name: str) -> float | None:
        """Of a total, all layers together; None where no step was made."""
        num_steps = self.total("num_steps")
        return self.total(name) / num_steps if num_steps > 0 else None

    @property
    def hit_share(self) -> float | None:
        """Rows whose expert was resident over all rows; None where there were none."""
        rows = self.total("resident_rows") + self.total("asleep_rows")
        return self.total("resident_rows") / rows if rows > 0 else None

    @property
    def layer_hit_shares(self) -> np.ndarray:
        """float64 [layers]; NaN for a layer without rows."""
        rows = np.subtract(self.after.layer_rows, self.before.layer_rows)
        asleep = np.subtract(self.after.layer_asleep_rows, self.before.layer_asleep_rows)
        return ratio(rows - asleep, rows)


def residency(view: View) -> dict[str, Any]:
    """expert_schemas.Residency."""
    if view.snapshot is None or view.snapshot.state == "loading":
        return {"available": False, "reason": NO_MODEL}
    status = view.snapshot.residency
    if status is None:
        return {"available": False, "reason": ALL_RESIDENT if serves(view.snapshot) else NO_MODEL}
    span, now = _growth(view.experts, status), _growth(view.recent_experts, status)
    return {
        "available": True,
        "num_slots": status.num_slots,
        "num_experts": status.num_experts,
        "layers": status.layers,
        "num_resident": status.num_resident,
        "hit_share_now": now.hit_share,
        "hit_share": span.hit_share,
        "layer_hit_shares": span.layer_hit_shares,
        "late_fetches_step_now": now.a_step("late_fetches"),
        "late_fetches_step": span.a_step("late_fetches"),
        "prefetches_used_step": span.a_step("prefetches_used"),
        "prefetches_unused_step": span.a_step("prefetches_unused"),
        "changes": {reason.value: span.changes(reason) for reason in ResidencyReason},
        "device_bytes": status.device_bytes,
        "host_bytes": status.host_bytes,
        "resident": resident_map(status),
    }


def residency_series(points: Sequence[ExpertPoint]) -> list[Series]:
    """One value for each two points; no series where all experts are resident."""
    looks = [point.residency for point in points]
    if not looks or not all(looks):
        return []
    growths = [Growth(before, after) for before, after in pairwise(looks) if before and after]
    seconds = np.maximum(np.diff([point.time_s for point in points]), 1e-3)
    found = [series("resident_share", "share", _numbers(growth.hit_share for growth in growths))]
    for name in FETCHES:
        found.append(series(name, "1/step", _numbers(growth.a_step(name) for growth in growths)))
    for reason in CHANGES:
        rates = _numbers(growth.changes(reason) for growth in growths) / seconds
        found.append(series("residency_changes", "1/s", rates, reason.value))
    return found


def resident_map(status: ResidencyStatus) -> np.ndarray:
    """uint8 [layers, E]: 1 where the expert holds a slot."""
    found = np.zeros((len(status.slot_experts), status.num_experts), np.uint8)
    for row, slots in zip(found, status.slot_experts, strict=True):
        row[[expert for expert in slots if expert >= 0]] = 1
    return found


def _growth(points: Sequence[ExpertPoint], status: ResidencyStatus) -> Growth:
    """From the first of the points to the last; none at all where there are no points."""
    looks = [point.residency for point in points if point.residency] or [status]
    return Growth(looks[0], looks[-1])


def _numbers(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
