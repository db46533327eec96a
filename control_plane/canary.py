"""A change on trial: what was measured before it, what is measured since, and whether that is too much worse.

Pure but for the ring of samples. A percentile over a span comes from the difference of two histograms' counts, so it
is as fine as the buckets; within a bucket it is interpolated.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from control_plane.percentiles import percentile
from runtime.engine.stats import EngineSnapshot, Histogram

Metric = Literal["itl_p99", "ttft_p99", "e2e_p99", "queue_p99", "throughput"]
QUANTILE = 0.99
SAMPLE_PERIOD_S = 1.0
KEPT_S = 600.0
FAR_WORSE = 2.0  # times what is allowed: no reason to wait for the end of the guard period


@dataclass(frozen=True, slots=True)
class CanarySpec:
    """What to watch for how long.

    max_worse_percent: by how much the metric may be worse than before: higher for times, lower for throughput.
    min_requests: requests (for itl_p99: gaps between tokens) that must be seen before and since.
    """

    guard_period_s: float
    metric: Metric
    max_worse_percent: float = 20.0
    min_requests: int = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """The totals of a snapshot that trials compare, at `time_s`."""

    time_s: float
    histograms: dict[str, tuple[tuple[float, ...], tuple[int, ...]]]  # metric -> bounds, counts
    generation_tokens: int
    num_finished: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric over a span: seconds, or tokens per second. value: None when nothing was seen."""

    value: float | None
    num_seen: int
    span_s: float


class Outcome(StrEnum):
    RUNNING = "running"
    EXTENDED = "extended"
    ACCEPTED = "accepted"
    REVERTED = "reverted"


@dataclass(frozen=True, slots=True)
class Trial:
    """A revision under guard. start: None until its rungs are compiled."""

    revision: int
    spec: CanarySpec
    before: Measured
    start: Sample | None
    is_extended: bool = False

    @property
    def end_s(self) -> float | None:
        """When it is judged, in the clock of the samples."""
        if self.start is None:
            return None
        return self.start.time_s + self.spec.guard_period_s * (2 if self.is_extended else 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done now, with the numbers. worse_percent: None while it cannot be said."""

    outcome: Outcome
    since: Measured
    worse_percent: float | None
    reason: str


class SampleRing:
    """One sample a second for ten minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=int(KEPT_S / SAMPLE_PERIOD_S) + 1)

    def add(self, sample: Sample) -> None:
        if not self._samples or sample.time_s - self._samples[-1].time_s >= SAMPLE_PERIOD_S:
            self._samples.append(sample)

    def since(self, time_s: float) -> Sample | None:
        """The oldest sample that is not older than `time_s`."""
        return next((s for s in self._samples if s.time_s >= time_s), None)


def sample(snapshot: EngineSnapshot, time_s: float) -> Sample:
    by_metric = {
        "itl_p99": snapshot.itl_s,
        "ttft_p99": snapshot.ttft_s,
        "e2e_p99": snapshot.e2e_s,
        "queue_p99": snapshot.queue_s,
    }
    return Sample(
        time_s,
        {name: _frozen(histogram) for name, histogram in by_metric.items()},
        snapshot.generation_tokens,
        sum(snapshot.finished.values()),
    )


def measure(metric: Metric, old: Sample | None, new: Sample) -> Measured:
    """The metric between two samples; nothing seen when there is no first one."""
    if old is None:
        return Measured(None, 0, 0.0)
    span_s = new.time_s - old.time_s
    if metric == "throughput":
        tokens = new.generation_tokens - old.generation_tokens
        value = tokens / span_s if span_s > 0 and tokens > 0 else None
        return Measured(value, new.num_finished - old.num_finished, span_s)
    bounds, after = new.histograms[metric]
    counts = [b - a for a, b in zip(old.histograms[metric][1], after, strict=True)]
    return Measured(percentile(bounds, counts, QUANTILE), sum(counts), span_s)


def worse_percent(metric: Metric, before: Measured, since: Measured) -> float | None:
    """How much worse it is since; negative when it is better."""
    if before.value is None or since.value is None or before.value <= 0:
        return None
    change = 100.0 * (since.value / before.value - 1.0)
    return -change if metric == "throughput" else change


def judge(trial: Trial, now: Sample) -> Verdict:
    """Running until the guard period ends, unless it is far worse already.

    Too little traffic to tell extends the period once; after that the change is taken back, for a change that was put
    under guard is not kept unguarded.
    """
    spec = trial.spec
    since = measure(spec.metric, trial.start, now)
    worse = worse_percent(spec.metric, trial.before, since)
    can_tell = worse is not None and since.num_seen >= spec.min_requests
    if trial.end_s is None:
        return Verdict(Outcome.RUNNING, since, None, "waiting for its rungs")
    if (
        can_tell
        and worse is not None
        and spec.metric != "throughput"
        and worse > FAR_WORSE * spec.max_worse_percent
    ):
        return Verdict(Outcome.REVERTED, since, worse, _comparison(trial, since, worse))
    if now.time_s < trial.end_s:
        return Verdict(Outcome.RUNNING, since, worse, "the guard period runs")
    if not can_tell:
        seen = f"{since.num_seen} of {spec.min_requests} observations of {spec.metric}"
        if not trial.is_extended:
            return Verdict(Outcome.EXTENDED, since, worse, f"only {seen}: the guard period is extended once")
        return Verdict(Outcome.REVERTED, since, worse, f"only {seen} in two guard periods: nobody could tell")
    assert worse is not None
    outcome = Outcome.REVERTED if worse > spec.max_worse_percent else Outcome.ACCEPTED
    return Verdict(outcome, since, worse, _comparison(trial, since, worse))


def _comparison(trial: Trial, since: Measured, worse: float) -> str:
    unit = "tokens/s" if trial.spec.metric == "throughput" else "s"
    return (
        f"{trial.spec.metric} was {trial.before.value:.4g} {unit}, is {since.value:.4g} {unit}: "
        f"{worse:+.1f} % worse, allowed {trial.spec.max_worse_percent:g} %"
    )


def _frozen(histogram: Histogram) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return histogram.bounds, tuple(histogram.counts)
