"""A run on a virtual clock: the real scheduler, controller and rung choice, with each rung's measured time for the device.

It follows the turns of `engine/loop.py`: two launches in flight, the older one read when the younger is launched.
Deterministic. What it leaves out: the host's work while the device is busy, the context's effect on a step's time,
and everything that other processes do to the machine.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.adaptive.observation import BELIEVED_FOR_S, MIN_LAUNCHES, Observation, smooth
from runtime.bench.adaptive_traffic import Job
from runtime.bench.client import RequestTimes
from runtime.bench.virtual_feeds import Feed
from runtime.config import EngineConfig
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy, limit_burst
from runtime.schedule.scheduler import Scheduler

PIPELINE_DEPTH = 2  # as in the engine's loop
_HELD_POLL_S = 0.001
_MAX_IDLE_TURNS = 100_000
_RECENT = 512  # finished requests whose lengths are looked at


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds.

    decode: by rung, (seconds of a launch apart from its steps, seconds of one step).
    prefill: by rung, seconds of one step.
    host_s: the host's work for one launch, during which an idle device waits.
    """

    decode: Mapping[int, tuple[float, float]]
    prefill: Mapping[int, float]
    host_s: float

    def of(self, bucket: Bucket, num_steps: int) -> float:
        if bucket.phase is Phase.PREFILL:
            return self.prefill[bucket.tokens]
        launch_s, step_s = self.decode[bucket.rows]
        return launch_s + num_steps * step_s

    def decode_step_s(self, rows: int) -> float:
        """One step launched alone."""
        return sum(self.decode[rows])


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """What does not change between runs."""

    ladder: BucketLadder
    times: StepTimes
    max_context: int
    num_pages: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """What came of it; the times of `times` are virtual seconds from zero."""

    times: tuple[RequestTimes, ...]
    duration_s: float
    num_launches: int
    num_steps_by_rung: Mapping[str, int]
    num_preemptions: int


class Ticker(Protocol):
    """The controller as the loop sees it."""

    @property
    def policy(self) -> SchedulePolicy: ...
    def is_due(self, now: float, /) -> bool: ...
    def tick(self, obs: Observation, now: float, /) -> SchedulePolicy: ...


type MakeTicker = Callable[[EngineConfig, Callable[[], float]], Ticker]


@dataclass(frozen=True, slots=True)
class _Measured:
    """A rung's step time, smoothed, and when it ran last."""

    step_s: float
    num_launches: int
    ended_s: float


@dataclass(frozen=True, slots=True)
class _Launch:
    plan: StepPlan
    bucket: Bucket
    launched_s: float
    end_s: float


class VirtualEngine:
    """One run. `rows`: the only decode rung; without a ticker the batch size stays at it."""

    def __init__(
        self,
        machine: VirtualMachine,
        config: EngineConfig,
        rows: int | None,
        make_ticker: MakeTicker | None,
    ) -> None:
        self.now_s = 0.0
        self._machine, self._config = machine, config
        ladder = machine.ladder
        self._decode = tuple(b for b in ladder.decode if rows in (None, b.rows))
        if not self._decode:
            raise ValueError(f"no decode rung of {rows} rows; there are {[b.rows for b in ladder.decode]}")
        self._ticker = make_ticker(config, self._clock) if make_ticker is not None else None
        self._max_steps = config.ladder.max_decode_steps
        self._scheduler = Scheduler(
            page_size=config.kv_cache.page_size,
            num_pages=machine.num_pages,
            num_rows=ladder.decode[-1].rows,
            max_context=machine.max_context,
            enable_prefix_cache=False,
            limits=self._limits,
            clock=self._clock,
            policy=self._ticker.policy if self._ticker else SchedulePolicy(batch_size=self._decode[-1].rows),
        )
        self._in_flight: deque[_Launch] = deque()
        self._device_free_s = self._read_s = 0.0
        self._step_s: dict[Phase, float] = {}  # smoothed
        self._step_s_by_rung: dict[Bucket, _Measured] = {}
        self._recent_lens: deque[int] = deque(maxlen=_RECENT)
        self._times: dict[str, RequestTimes] = {}
        self._num_open = self._num_launches = 0
        self._num_steps: dict[str, int] = {}

    def run(self, feed: Feed) -> VirtualRun:
        """Until the feed is empty and everything has ended. Raises RuntimeError if nothing moves any more."""
        num_idle = 0
        while True:
            for job, arrival_s in feed.take(self.now_s, self._num_open):
                self._add(job, arrival_s)
            self._tick()
            plan = self._scheduler.schedule() if len(self._in_flight) < PIPELINE_DEPTH else None
            if plan is not None:
                self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) == PIPELINE_DEPTH):
                self._collect()
            if plan is not None or self._in_flight:
                num_idle = 0
                continue
            next_s = feed.next_s(self.now_s)
            if self._scheduler.is_idle:
                if next_s is None:
                    break
                self.now_s = max(self.now_s, next_s)
            else:  # held back for company, or a row or a page is missing
                held_s = self.now_s + _HELD_POLL_S
                self.now_s = held_s if next_s is None or next_s <= self.now_s else min(held_s, next_s)
            num_idle += 1
            if num_idle > _MAX_IDLE_TURNS:
                raise RuntimeError(
                    f"nothing moves any more at {self.now_s:.3f} s, {self._num_open} requests open"
                )
        self._scheduler.check_integrity()
        times = tuple(self._times.values())
        start_s = min((t.arrival_s for t in times), default=0.0)
        return VirtualRun(
            times,
            self.now_s - start_s,
            self._num_launches,
            dict(self._num_steps),
            self._scheduler.num_preemptions,
        )

    def _clock(self) -> float:
        return self.now_s

    def _limits(self) -> StepLimits:
        largest = self._machine.ladder.prefill[-1]
        return StepLimits(largest.tokens, largest.rows, self._decode[-1].rows, self._max_steps)

    def _add(self, job: Job, arrival_s: float) -> None:
        request_id = str(len(self._times))
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
        self._scheduler.add(Request(request_id, (0,) * job.prompt_len, params, arrival_s=arrival_s))
        self._times[request_id] = RequestTimes(job.prompt_len, arrival_s)
        self._num_open += 1

    def _launch(self, plan: StepPlan) -> None:
        bucket = self._pick(plan)
        self.now_s += self._machine.times.host_s
        end_s = max(self.now_s, self._device_free_s) + self._machine.times.of(bucket, plan.num_steps)
        self._in_flight.append(_Launch(plan, bucket, self.now_s, end_s))
        self._device_free_s = end_s
        self._num_launches += 1
        self._num_steps[bucket.name] = self._num_steps.get(bucket.name, 0) + plan.num_steps

    def _pick(self, plan: StepPlan) -> Bucket:
        """The rule of BucketLadder.pick, among the rungs that this run may use."""
        page = self._config.kv_cache.page_size
        if plan.phase is Phase.DECODE:
            tokens = len(plan.chunks)
        else:
            tokens = sum(-(-c.num_tokens // page) * page for c in plan.chunks)
        is_usable = self._decode.__contains__ if plan.phase is Phase.DECODE else lambda bucket: True
        return self._machine.ladder.pick(plan.phase, tokens, len(plan.chunks), is_usable)

    def _collect(self) -> None:
        launch = self._in_flight.popleft()
        self.now_s = max(self.now_s, launch.end_s)
        self._count(launch)
        plan = launch.plan
        result = StepResult(tuple(_tokens_of(chunk, plan.phase) for chunk in plan.chunks))
        for sequence, tokens in self._scheduler.collect(plan, result):
            times = self._times[sequence.request_id]
            times.event_s.append(self.now_s)
            times.event_tokens.append(len(tokens))
            if sequence.finish_reason is not None:
                times.finished_s, times.finish_reason = self.now_s, sequence.finish_reason
                self._num_open -= 1
                self._recent_lens.append(sequence.max_len)

    def _count(self, launch: _Launch) -> None:
        step_s = (self.now_s - max(launch.launched_s, self._read_s)) / launch.plan.num_steps
        self._read_s = self.now_s
        phase = launch.plan.phase
        self._step_s[phase] = smooth(self._step_s.get(phase), step_s)
        before = self._step_s_by_rung.get(launch.bucket, _Measured(step_s, 0, 0.0))
        self._step_s_by_rung[launch.bucket] = _Measured(
            smooth(before.step_s, step_s), before.num_launches + 1, self.now_s
        )
        if phase is Phase.DECODE:
            steps = self._config.ladder.max_decode_steps
            self._max_steps = limit_burst(steps, self._step_s[phase], self._config.slo.itl)

    def _tick(self) -> None:
        if self._ticker is not None and self._ticker.is_due(self.now_s):
            self._scheduler.policy = self._ticker.tick(self._observe(), self.now_s)

    def _observe(self) -> Observation:
        scheduler, machine = self._scheduler, self._machine
        oldest_s = scheduler.oldest_arrival_s
        num_pages = machine.num_pages - 1  # the dummy page is nobody's
        free_pages = max(0, num_pages - scheduler.num_used_pages)
        quantile = self._config.controller.expected_len_quantile
        return Observation(
            time_s=self.now_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            oldest_wait_s=0.0 if oldest_s is None else self.now_s - oldest_s,
            used_pages=scheduler.num_used_pages,
            num_pages=num_pages,
            free_bytes=free_pages * scheduler.page_size * machine.bytes_per_token,
            bytes_per_token=machine.bytes_per_token,
            expected_len=float(np.quantile(self._recent_lens, quantile)) if self._recent_lens else None,
            decode_step_s=self._step_s.get(Phase.DECODE),
            prefill_step_s=self._step_s.get(Phase.PREFILL),
            decode_rungs=tuple(b.rows for b in self._decode),
            prefill_rungs=tuple(b.tokens for b in machine.ladder.prefill),
            decode_step_s_by_rows={b.rows: t for b, t in self._measured(Phase.DECODE)},
            prefill_step_s_by_tokens={b.tokens: t for b, t in self._measured(Phase.PREFILL)},
        )

    def _measured(self, phase: Phase) -> Iterator[tuple[Bucket, float]]:
        for bucket, found in self._step_s_by_rung.items():
            is_believed = found.num_launches >= MIN_LAUNCHES and self.now_s - found.ended_s <= BELIEVED_FOR_S
            if bucket.phase is phase and is_believed:
                yield bucket, found.step_s


def _tokens_of(chunk: ScheduledChunk, phase: Phase) -> tuple[int, ...]:
    if not chunk.samples:
        return ()
    return (0,) * (chunk.num_tokens if phase is Phase.DECODE else 1)
