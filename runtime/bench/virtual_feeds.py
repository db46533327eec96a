"""Where the requests of a virtual run come from: by time, from a full queue, or in static batches."""

from collections.abc import Sequence
from typing import Protocol

from runtime.bench.adaptive_traffic import Job
from runtime.bench.static_batches import next_batch


class Feed(Protocol):
    """Jobs with the time at which their user sent them."""

    def take(self, now_s: float, num_open: int) -> list[tuple[Job, float]]:
        """Jobs that enter the engine now, given how many are in it."""
        ...

    def next_s(self, now_s: float) -> float | None:
        """When to ask an idle engine's feed again; None when nothing is left."""
        ...


class OpenFeed:
    """Each job at its own time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs, self._next = jobs, 0

    def take(self, now_s: float, num_open: int) -> list[tuple[Job, float]]:
        first = self._next
        while self._next < len(self._jobs) and self._jobs[self._next].arrival_s <= now_s:
            self._next += 1
        return [(job, job.arrival_s) for job in self._jobs[first : self._next]]

    def next_s(self, now_s: float) -> float | None:
        return self._jobs[self._next].arrival_s if self._next < len(self._jobs) else None


class ClosedFeed:
    """As many jobs as are needed to keep `size` in the engine."""

    def __init__(self, jobs: Sequence[Job], size: int) -> None:
        self._jobs, self._size, self._next = jobs, size, 0

    def take(self, now_s: float, num_open: int) -> list[tuple[Job, float]]:
        num = min(max(0, self._size - num_open), len(self._jobs) - self._next)
        self._next += num
        return [(job, now_s) for job in self._jobs[self._next - num : self._next]]

    def next_s(self, now_s: float) -> float | None:
        return now_s if self._next < len(self._jobs) else None


class StaticFeed:
    """A batch at a time, the next only when the engine is empty."""

    def __init__(self, jobs: Sequence[Job], batch_size: int, timeout_s: float, *, is_open: bool) -> None:
        self._jobs, self._next = jobs, 0
        self._arrivals = [job.arrival_s if is_open else 0.0 for job in jobs]
        self._batch_size, self._timeout_s = batch_size, timeout_s
        self._free_s = 0.0
        self._is_free = True

    def take(self, now_s: float, num_open: int) -> list[tuple[Job, float]]:
        if num_open or self._next >= len(self._jobs):
            self._is_free = False
            return []
        if not self._is_free:
            self._free_s, self._is_free = now_s, True
        batch = next_batch(self._arrivals, self._next, self._free_s, self._batch_size, self._timeout_s)
        if batch.start_s > now_s:
            return []
        self._next = batch.end
        return [(self._jobs[i], self._arrivals[i]) for i in range(batch.first, batch.end)]

    def next_s(self, now_s: float) -> float | None:
        if self._next >= len(self._jobs):
            return None
        batch = next_batch(self._arrivals, self._next, now_s, self._batch_size, self._timeout_s)
        return batch.start_s
