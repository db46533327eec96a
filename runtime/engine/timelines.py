"""Timelines: what happened to each of the last requests, in times and counts, never text. Imports no JAX.

The engine's thread writes: a dictionary lookup and a few additions for each row of a launch, nothing when switched off.
Any thread reads copies.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from enum import StrEnum

from runtime.schedule.plan import Phase, StepPlan
from runtime.schedule.sequence import Sequence, SequenceStatus

KEPT_REQUESTS = 2048
MAX_EVENTS = 128  # of one request; its end is always kept


class EventKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FIRST_TOKEN = "first_token"  # noqa: S105
    FINISHED = "finished"


@dataclass(slots=True)
class TraceEvent:
    """Something that happened at `time_s` (monotonic). Launches of one decode rung in a row are one event.

    duration_s: from the launch to the last read. tokens: positions computed in prefill, tokens read in decode.
    """

    time_s: float
    kind: EventKind
    rung: str = ""
    duration_s: float = 0.0
    tokens: int = 0
    launches: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A copy of one request's timeline. Times are monotonic seconds, None until they come."""

    request_id: str
    state: str  # waiting, running, finished
    arrival_s: float
    num_prompt: int
    num_cached: int
    num_generated: int
    num_preemptions: int
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None
    finish_reason: str | None
    events: tuple[TraceEvent, ...] = ()
    rungs: dict[str, int] = field(default_factory=dict)  # launches by rung
    num_dropped: int = 0


@dataclass(slots=True)
class _Timeline:
    """The mutable side of a Trace. sequence: None once it has ended, so that its tokens are not kept."""

    summary: Trace
    sequence: Sequence | None
    events: list[TraceEvent] = field(default_factory=list)
    first_token_s: float | None = None
    num_preemptions: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # events that did not fit, by rung

    def add(self, event: TraceEvent) -> None:
        if len(self.events) < MAX_EVENTS - 1:
            self.events.append(event)
        else:
            self.dropped[event.rung] += 1

    def rungs(self) -> dict[str, int]:
        """Launches by rung."""
        found = Counter(self.dropped)
        for event in list(self.events):
            found[event.rung] += event.launches
        return {rung: num for rung, num in found.items() if rung}


class Timelines:
    """The last KEPT_REQUESTS requests."""

    def __init__(self, is_on: bool = True, kept: int = KEPT_REQUESTS) -> None:
        self.kept = kept
        self._is_on = is_on
        self._lock = threading.Lock()  # held to add, drop and list requests, not for a step
        self._all: OrderedDict[str, _Timeline] = OrderedDict()
        self._open: dict[Sequence, _Timeline] = {}  # those that have not ended; the engine's thread only
        self._num_preemptions = 0

    # -- the engine's thread ------------------------------------------------------------------------------------

    def switch(self, is_on: bool) -> None:
        """Off forgets everything."""
        self._is_on = is_on
        if not is_on:
            self._open.clear()
            with self._lock:
                self._all.clear()

    def start(self, sequence: Sequence) -> None:
        """A request was put in line."""
        if not self._is_on:
            return
        timeline = _Timeline(_summary(sequence), sequence)
        self._open[sequence] = timeline
        with self._lock:
            self._all[sequence.request_id] = timeline
            while len(self._all) > self.kept:
                oldest = self._all.popitem(last=False)[1]
                if oldest.sequence is not None:
                    self._open.pop(oldest.sequence, None)

    def on_step(
        self,
        plan: StepPlan,
        rung: str,
        launched_s: float,
        now_s: float,
        token_ids: tuple[tuple[int, ...], ...],
    ) -> None:
        """A launch was read; `token_ids` by chunk of the plan."""
        if not self._open:
            return
        is_prefill, seconds = plan.phase is Phase.PREFILL, now_s - launched_s
        for chunk, tokens in zip(plan.chunks, token_ids, strict=True):
            timeline = self._open.get(chunk.sequence)
            if timeline is None:
                continue
            if is_prefill:
                timeline.add(TraceEvent(launched_s, EventKind.PREFILL, rung, seconds, chunk.num_tokens, 1))
            elif tokens:
                last = timeline.events[-1] if timeline.events else None
                if last is not None and last.kind is EventKind.DECODE and last.rung == rung:
                    last.duration_s = now_s - last.time_s
                    last.tokens += len(tokens)
                    last.launches += 1
                else:
                    timeline.add(TraceEvent(launched_s, EventKind.DECODE, rung, seconds, len(tokens), 1))
            if timeline.first_token_s is None and tokens:
                timeline.first_token_s = now_s
                timeline.add(TraceEvent(now_s, EventKind.FIRST_TOKEN))

    def on_preemptions(self, num_preemptions: int, now_s: float) -> None:
        """The scheduler's count after a schedule; when it has moved, whose it was."""
        if num_preemptions == self._num_preemptions:
            return
        self._num_preemptions = num_preemptions
        for timeline in self._open.values():
            sequence = timeline.sequence
            if sequence is not None and sequence.num_preemptions > timeline.num_preemptions:
                timeline.num_preemptions = sequence.num_preemptions
                timeline.add(TraceEvent(now_s, EventKind.PREEMPTED))

    def finish(self, sequence: Sequence, reason: str, now_s: float, detail: str = "") -> None:
        """A request has ended, however; one that is not kept is fine."""
        timeline = self._open.pop(sequence, None)
        if timeline is None:
            return
        timeline.events.append(TraceEvent(now_s, EventKind.FINISHED, detail=detail or reason))
        timeline.summary = replace(
            _summary(sequence), state="finished", finished_s=now_s, finish_reason=reason
        )
        timeline.sequence = None

    # -- any thread ---------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._is_on

    def newest(self, limit: int) -> list[Trace]:
        """The last requests, newest first, without their events."""
        with self._lock:
            found = list(reversed(self._all.values()))[:limit]
        return [_copy(timeline, with_events=False) for timeline in found]

    def find(self, names: frozenset[str], limit: int = 64) -> list[Trace]:
        """The requests with these ids, or that belong to the calls of these ids (`CALL-0`, `CALL-1`), oldest first."""
        with self._lock:
            found = [
                timeline
                for request_id, timeline in self._all.items()
                if request_id in names or request_id.rpartition("-")[0] in names
            ]
        return [_copy(timeline, with_events=True) for timeline in found[:limit]]


def _summary(sequence: Sequence) -> Trace:
    request = sequence.request
    return Trace(
        request_id=request.request_id,
        state="running" if sequence.status is SequenceStatus.RUNNING else "waiting",
        arrival_s=request.arrival_s,
        num_prompt=len(request.prompt_ids),
        num_cached=sequence.num_cached,
        num_generated=len(sequence.output_ids),
        num_preemptions=sequence.num_preemptions,
        first_scheduled_s=sequence.first_scheduled_s,
        first_token_s=None,
        finished_s=None,
        finish_reason=None,
    )


def _copy(timeline: _Timeline, *, with_events: bool) -> Trace:
    sequence = timeline.sequence  # read once: the engine's thread may end the request meanwhile
    summary = timeline.summary if sequence is None else _summary(sequence)
    if not with_events:
        return replace(summary, first_token_s=timeline.first_token_s)
    return replace(
        summary,
        first_token_s=timeline.first_token_s,
        events=tuple(replace(event) for event in list(timeline.events)),
        rungs=timeline.rungs(),
        num_dropped=timeline.dropped.total(),
    )
