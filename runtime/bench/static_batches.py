"""Classic static batches: collect until a batch is full or the oldest has waited long enough, run it to its end.

Nobody joins a batch that runs. The rule is one pure function; both the real engine and the virtual clock play by it.
Each request's own last token counts as its end (a server of this kind often answers only when the whole batch is
done, which would be worse for it).
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rich.progress import Progress, TaskID

from runtime.bench.client import RequestTimes
from runtime.bench.replay import Planned, Played
from runtime.bench.running import RunningEngine
from runtime.bench.workload import greedy_request


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests [first, end) start together at `start_s`."""

    start_s: float
    first: int
    end: int


def next_batch(
    arrivals: Sequence[float], first: int, free_s: float, batch_size: int, timeout_s: float
) -> Batch:
    """The next batch of sorted arrivals from `first` on, when the engine is free from free_s."""
    full = first + batch_size - 1
    when_full_s = arrivals[full] if full < len(arrivals) else float("inf")
    start_s = max(free_s, min(when_full_s, arrivals[first] + timeout_s))
    return Batch(start_s, first, min(first + batch_size, bisect_right(arrivals, start_s)))


def play_static(
    engine: RunningEngine,
    plans: list[Planned],
    batch_size: int,
    timeout_s: float,
    name: str,
    progress: Progress,
    task: TaskID,
) -> Played:
    """Play plans, sorted by time, in static batches; all offsets zero is a queue that is always full."""
    before = engine.fresh_snapshot()
    start_s = time.monotonic()
    arrivals = [start_s + plan.offset_s for plan in plans]
    times: list[RequestTimes] = []
    first, latest_s = 0, 0.0
    while first < len(plans):
        batch = next_batch(arrivals, first, time.monotonic(), batch_size, timeout_s)
        time.sleep(max(0.0, batch.start_s - time.monotonic()))
        latest_s = max(latest_s, time.monotonic() - batch.start_s)
        engine.client.submit(
            greedy_request(f"{name}-{i}", plans[i].prompt, plans[i].num_new, arrivals[i])
            for i in range(batch.first, batch.end)
        )
        engine.client.wait()
        times += engine.client.take().values()
        progress.update(task, advance=batch.end - batch.first)
        first = batch.end
    end_s = max((t.finished_s for t in times if t.finished_s is not None), default=time.monotonic())
    return Played(tuple(times), before, engine.fresh_snapshot(), end_s - start_s, latest_s)
