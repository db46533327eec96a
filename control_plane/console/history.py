"""History: what the engine looked like over the last 24 hours, in three rings of fixed size. No clock, no HTTP.

Totals are kept as totals: the difference of two points is exact over any interval, so a coarse ring loses detail and
nothing else. Gauges are joined by least, mean and greatest. Owned by one thread; points are frozen.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.engine.expert_status import ResidencyStatus
from runtime.engine.stats import EngineSnapshot, PhaseTotals

TICK_S = 2.0
SPAN_S: Mapping[str, float] = {"15min": 900.0, "3h": 10_800.0, "24h": 86_400.0}
STEP_S: Mapping[str, float] = {"15min": TICK_S, "3h": 30.0, "24h": 300.0}
EXPERT_POINTS = 30  # of each span: whole matrices

TOTALS = (
    "generation_tokens", "prompt_tokens", "cached_prompt_tokens", "prefix_queries", "prefix_hits", "preemptions",
    "rejected", "finished", "busy_s", "requests", "kept", "ttft_missed", "itl_missed", "late_compiles",
    "prefill_real", "prefill_computed", "prefill_busy_s", "decode_real", "decode_computed", "decode_busy_s",
)  # fmt: skip
GAUGES = ("running", "waiting", "kv_use", "used_pages", "cached_pages", "batch_size", "micro_batch_size")
HISTOGRAMS = ("ttft", "itl", "e2e", "queue")
RUNG_TOTALS = ("hits", "real_tokens", "computed_tokens", "busy_s")


@dataclass(frozen=True, slots=True)
class Point:
    """The engine at `time_s` (Unix). Arrays are never written to.

    totals [len(TOTALS)]. low, high, sums [len(GAUGES)] over `num` samples. counts: by name of HISTOGRAMS.
    rungs [R, len(RUNG_TOTALS)], by rung_names.
    """

    time_s: float
    totals: np.ndarray
    counts: Mapping[str, np.ndarray]
    bounds: Mapping[str, tuple[float, ...]]
    rung_names: tuple[str, ...]
    rungs: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sums: np.ndarray
    num: int = 1

    def joined(self, later: "Point") -> "Point":
        """One point for the interval of both."""
        return replace(
            later,
            time_s=max(self.time_s, later.time_s),
            low=np.minimum(self.low, later.low),
            high=np.maximum(self.high, later.high),
            sums=self.sums + later.sums,
            num=self.num + later.num,
        )


@dataclass(frozen=True, slots=True)
class ExpertPoint:
    """Tokens by layer and expert since the start, [L, E], at `time_s` (Unix); device_rows: by layer and device, [L, D].

    residency: totals since the start, without the table of slots, which is asked for as it is now only.
    """

    time_s: float
    tokens: np.ndarray
    device_rows: np.ndarray | None = None  # None on one device
    residency: ResidencyStatus | None = None  # None where all experts are resident

    def joined(self, later: "ExpertPoint") -> "ExpertPoint":
        return replace(later, time_s=max(self.time_s, later.time_s))


class Ring[P: (Point, ExpertPoint)]:
    """The last `num` intervals of `step_s`; samples of one interval become one point.

    The first sample of all stays alone: it is what the others are compared with, and a server that has just started
    shows something after two. A clock that was set back by more than an interval begins it anew: times only ascend.
    """

    def __init__(self, step_s: float, num: int) -> None:
        self._step_s = step_s
        self._points: deque[P] = deque(maxlen=num + 1)  # one more: the first is only compared with

    def add(self, point: P) -> None:
        if self._points and point.time_s < self._points[-1].time_s - self._step_s:
            self._points.clear()
        last = self._points[-1] if self._points else None
        is_open = last is not None and point.time_s // self._step_s <= last.time_s // self._step_s
        if last is not None and is_open and len(self._points) > 1:
            self._points[-1] = last.joined(point)
        else:
            self._points.append(point)

    def since(self, time_s: float) -> tuple[P, ...]:
        """The points from `time_s` on, and the last one before."""
        points = tuple(self._points)
        num_old = sum(point.time_s < time_s for point in points)
        return points[max(0, num_old - 1) :]


class History:
    """One ring for each span, and one of expert matrices for each."""

    def __init__(self) -> None:
        self._rings = {span: Ring[Point](STEP_S[span], _num_points(span)) for span in SPAN_S}
        self._experts = {
            span: Ring[ExpertPoint](seconds / EXPERT_POINTS, EXPERT_POINTS)
            for span, seconds in SPAN_S.items()
        }
        self._names: tuple[str, ...] = ()

    def add(self, snapshot: EngineSnapshot, time_s: float) -> None:
        """A sample at `time_s` (Unix)."""
        point = _point(snapshot, time_s, self._names)
        self._names = point.rung_names
        for ring in self._rings.values():
            ring.add(point)
        if snapshot.expert_tokens:
            tokens = np.asarray(snapshot.expert_tokens, np.int64)
            rows = np.asarray(snapshot.experts.device_rows, np.int64) if snapshot.experts else None
            residency = replace(snapshot.residency, slot_experts=()) if snapshot.residency else None
            for ring in self._experts.values():
                ring.add(ExpertPoint(time_s, tokens, rows, residency))

    def points(self, span: str, now_s: float) -> tuple[Point, ...]:
        return self._rings[span].since(now_s - SPAN_S[span])

    def experts(self, span: str, now_s: float) -> tuple[ExpertPoint, ...]:
        return self._experts[span].since(now_s - SPAN_S[span])

    def recent(self, seconds: float, now_s: float) -> tuple[Point, ...]:
        """The last seconds, as finely as there is."""
        return self._rings["15min"].since(now_s - seconds)

    def recent_experts(self, seconds: float, now_s: float) -> tuple[ExpertPoint, ...]:
        return self._experts["15min"].since(now_s - seconds)


def _num_points(span: str) -> int:
    return round(SPAN_S[span] / STEP_S[span])


def _point(s: EngineSnapshot, time_s: float, names_before: tuple[str, ...]) -> Point:
    names = tuple(rung.name for rung in s.rungs)
    rungs = [[getattr(rung, name) for name in RUNG_TOTALS] for rung in s.rungs]
    found = {"ttft": s.ttft_s, "itl": s.itl_s, "e2e": s.e2e_s, "queue": s.queue_s}
    prefill, decode = s.phases.get("prefill", PhaseTotals()), s.phases.get("decode", PhaseTotals())
    promises = s.promises
    totals: Sequence[float] = (
        s.generation_tokens, s.prompt_tokens, s.cached_prompt_tokens, s.prefix_queries, s.prefix_hits,
        s.num_preemptions, sum(s.rejected.values()), sum(s.finished.values()), s.busy_s, promises.num_requests,
        promises.num_kept, promises.num_ttft_missed, promises.num_itl_missed, s.late_compiles,
        prefill.real_tokens, prefill.computed_tokens, prefill.busy_s,
        decode.real_tokens, decode.computed_tokens, decode.busy_s,
    )  # fmt: skip
    kv_use = s.used_pages / s.num_pages if s.num_pages else 0.0
    gauges = np.array(
        (
            s.num_running, s.num_waiting, kv_use, s.used_pages, s.cached_pages, s.policy.batch_size,
            s.policy.micro_batch_size,
        ),
        np.float64,
    )  # fmt: skip
    return Point(
        time_s=time_s,
        totals=np.array(totals, np.float64),
        counts={name: np.array(histogram.counts, np.int64) for name, histogram in found.items()},
        bounds={name: histogram.bounds for name, histogram in found.items()},
        rung_names=names_before if names == names_before else names,
        rungs=np.array(rungs, np.float64).reshape(len(names), len(RUNG_TOTALS)),
        low=gauges,
        high=gauges,
        sums=gauges,
    )
