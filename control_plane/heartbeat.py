"""Liveness from the engine's step counter: it freezes only on a stall, however busy the engine is."""

import time
from collections.abc import Callable

from runtime.engine.stats import EngineSnapshot


class Heartbeat:
    """Work is queued and the counter stands still for `stall_s`: the engine hangs. No probe enters the queue."""

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._num_steps = -1
        self._still_since_s: float | None = None

    def observe(self, snapshot: EngineSnapshot, num_open: int) -> bool:
        """Whether the engine is alive. Call it often: a stall counts from the first look that saw it."""
        now = self._clock()
        has_work = bool(num_open or snapshot.num_running or snapshot.num_waiting)
        if snapshot.num_steps != self._num_steps or not has_work:
            self._num_steps = snapshot.num_steps
            self._still_since_s = None
        elif self._still_since_s is None:
            self._still_since_s = now
        return self._still_since_s is None or now - self._still_since_s < self._stall_s
