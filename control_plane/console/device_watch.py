"""DeviceWatch: how evenly devices computed before the experts moved and since. Host data only, no clock.

A *run* is a stretch of ticks in which experts move or moves wait. What was computed in the quiet before the last run is
"before", what has been computed since it ended "after". Owned by one thread; what it gives out is frozen.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.engine.expert_status import ExpertStatus

QUIET_TICKS = 60  # about two minutes: long enough for figures, short enough to be about the load of late


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """rows_before, rows_after: int64 [L, D], rows of the quiet before the last run and of the quiet now; None: none seen.

    began_s: Unix time at which the last run was first seen; None before the first.
    """

    rows_before: np.ndarray | None = None
    rows_after: np.ndarray | None = None
    began_s: float | None = None


class DeviceWatch:
    """One for a server. `add` once a tick."""

    def __init__(self) -> None:
        self._begin()

    def add(self, status: ExpertStatus, time_s: float) -> None:
        """time_s: Unix."""
        rows = np.asarray(status.device_rows, np.int64)
        shape = (rows.shape, status.num_devices)
        if self._shape not in (None, shape) or status.applied_moves < (self._applied or 0):
            self._begin()  # another engine
        is_running = status.waiting_moves > 0 or status.applied_moves != (self._applied or 0)
        if is_running and not self._is_running:
            self._began_s, self._before = time_s, self._gained()
            self._quiet.clear()
        if not is_running:
            self._quiet.append(rows)
        self._shape, self._applied, self._is_running = shape, status.applied_moves, is_running

    def figures(self) -> DeviceFigures:
        return DeviceFigures(self._before, self._gained(), self._began_s)

    def _begin(self) -> None:
        self._quiet: deque[np.ndarray] = deque(maxlen=QUIET_TICKS + 1)
        self._shape: tuple[tuple[int, ...], int] | None = None
        self._applied: int | None = None
        self._is_running = False
        self._before: np.ndarray | None = None
        self._began_s: float | None = None

    def _gained(self) -> np.ndarray | None:
        """Rows of the quiet; None where nothing was computed."""
        if len(self._quiet) < 2:
            return None
        gained = self._quiet[-1] - self._quiet[0]
        return gained if gained.any() else None
