"""Plays requests against a running engine: open loop by arrival time, or closed loop to find its capacity."""

import time
from dataclasses import dataclass

from rich.progress import Progress

from runtime.bench.client import RequestTimes
from runtime.bench.running import RunningEngine
from runtime.bench.traces import BLOCK_LEN, TraceRequest
from runtime.bench.workload import block_prompt, greedy_request, random_prompts
from runtime.engine.stats import EngineSnapshot


@dataclass(frozen=True, slots=True)
class Planned:
    """A request ready to be sent `offset_s` after the first one."""

    offset_s: float
    prompt: tuple[int, ...]
    num_new: int


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it. `duration_s` runs from the first arrival to the last token."""

    times: tuple[RequestTimes, ...]
    before: EngineSnapshot
    after: EngineSnapshot
    duration_s: float
    latest_send_s: (
        float  # how late the worst request was handed over; a large value means the sender was the limit
    )

    @property
    def tokens_s(self) -> float:
        """Prompt and output tokens together: the load that a busy machine can take."""
        return sum(t.prompt_len + t.num_tokens for t in self.times) / self.duration_s

    @property
    def busy_share(self) -> float:
        """Share of the time that some launch was on the device."""
        return min(1.0, (self.after.busy_s - self.before.busy_s) / self.duration_s)


def plan_requests(
    requests: list[TraceRequest], vocab_size: int, length_scale: float, seed: int
) -> list[Planned]:
    """Prompts for scaled requests: shared where the trace says so, different elsewhere. Another seed shares nothing."""
    block_len = max(1, int(BLOCK_LEN * length_scale))
    start_s = requests[0].t_s
    plans = []
    for i, request in enumerate(requests):
        if request.block_ids:
            prompt = block_prompt(request.block_ids, block_len, request.prompt_len, vocab_size, seed)
        else:
            prompt = random_prompts(1, request.prompt_len, vocab_size, seed * 1_000_003 + i)[0]
        plans.append(Planned(request.t_s - start_s, prompt, request.output_len))
    return plans


def play_open(
    engine: RunningEngine, plans: list[Planned], time_scale: float, name: str, progress: Progress
) -> Played:
    """Send each request at its own time, `time_scale` times as fast as recorded, whatever the engine does."""
    task = progress.add_task(name, total=len(plans))
    before = engine.fresh_snapshot()
    start_s = time.monotonic()
    latest_s = 0.0
    for i, plan in enumerate(plans):
        arrival_s = start_s + plan.offset_s / time_scale
        while (left_s := arrival_s - time.monotonic()) > 0:
            progress.update(task, completed=i - engine.client.num_open)
            time.sleep(min(left_s, 0.25))
        latest_s = max(latest_s, -left_s)
        engine.client.submit([greedy_request(f"{name}-{i}", plan.prompt, plan.num_new, arrival_s)])
    return _finish(engine, before, start_s, latest_s, progress, task, len(plans))


def play_closed(
    engine: RunningEngine, plans: list[Planned], num_open: int, name: str, progress: Progress
) -> Played:
    """Keep `num_open` requests in the engine all the time: what it can do when it never waits for work."""
    task = progress.add_task(name, total=len(plans))
    before = engine.fresh_snapshot()
    start_s = time.monotonic()
    for i, plan in enumerate(plans):
        engine.client.wait(at_most_open=num_open - 1)
        engine.client.submit([greedy_request(f"{name}-{i}", plan.prompt, plan.num_new, time.monotonic())])
        progress.update(task, completed=i - engine.client.num_open)
    return _finish(engine, before, start_s, 0.0, progress, task, len(plans))


def _finish(
    engine: RunningEngine,
    before: EngineSnapshot,
    start_s: float,
    latest_s: float,
    progress: Progress,
    task,
    num: int,
) -> Played:
    while engine.client.num_open:
        engine.client.wait(at_most_open=max(0, engine.client.num_open - 1))
        progress.update(task, completed=num - engine.client.num_open)
    times = tuple(engine.client.take().values())
    end_s = max((t.finished_s for t in times if t.finished_s is not None), default=time.monotonic())
    progress.remove_task(task)
    return Played(times, before, engine.fresh_snapshot(), end_s - start_s, latest_s)
