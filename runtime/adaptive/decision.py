"""Decision: one tick of one controller with its named reason; DecisionLog: the ring that keeps them. Imports no JAX."""

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """What a controller said at `time_s` (monotonic seconds): `previous` became `value` because of `reason`.

    number: counts up from 1 without gaps, over all controllers.
    inputs: the numbers that the decision rests on, by name.
    """

    number: int
    time_s: float
    controller: str
    previous: float
    value: float
    reason: str
    inputs: Mapping[str, float | int | str | None]


class DecisionLog:
    """The last decisions, written by the engine's thread and read by any."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._ring: deque[Decision] = deque(maxlen=capacity)
        self._num = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(
        self,
        time_s: float,
        controller: str,
        previous: float,
        value: float,
        reason: str,
        inputs: Mapping[str, float | int | str | None],
    ) -> Decision:
        with self._lock:
            self._num += 1
            decision = Decision(self._num, time_s, controller, previous, value, reason, inputs)
            self._ring.append(decision)
            self._counts[controller, reason] += 1
            return decision

    def after(self, number: int, limit: int) -> tuple[Decision, ...]:
        """The oldest `limit` kept decisions with a larger number."""
        with self._lock:
            first = self._num - len(self._ring)
            start = max(0, number - first)
            return tuple(self._ring[i] for i in range(start, min(len(self._ring), start + limit)))

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Decisions since the start by (controller, reason)."""
        with self._lock:
            return dict(self._counts)
