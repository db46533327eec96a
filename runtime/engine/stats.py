"""Counters and histograms of one engine, and the frozen snapshot that others read. Imports no JAX.

The engine's thread is the only writer; `EngineStats.snapshot` may be called from that thread only and its result
handed to anyone.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from runtime.engine.change import LadderChange
from runtime.engine.expert_status import ExpertStatus, ResidencyStatus
from runtime.engine.host_status import HostStatus
from runtime.ladder.scopes import ROUTING_SCOPES
from runtime.schedule.policy import SchedulePolicy

TTFT_BOUNDS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
ITL_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
LONG_BOUNDS_S = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

MAX_UNADDED = 256  # launches whose counts by expert wait to be added up


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound (inclusive), with the sum: a Prometheus histogram before it is one."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(frozen=True, slots=True)
class RungSnapshot:
    """One rung of the ladder: its state (absent, compiling, ready, failed) and what it has computed.

    `real_tokens` of `computed_tokens` positions were asked for; the rest was padding.
    """

    name: str
    phase: str
    size: int
    state: str
    compile_s: float
    from_cache: bool
    temp_bytes: int
    hits: int
    real_tokens: int
    computed_tokens: int
    step_s: float  # median of the last launches: seconds of one step
    error: str = ""
    scope_shares: Mapping[str, float] = field(default_factory=dict)  # of a step's time, where it was profiled

    @property
    def routing_share(self) -> float:
        """Router, dispatch and combine in a step's time."""
        return sum(self.scope_shares.get(scope, 0.0) for scope in ROUTING_SCOPES)

    busy_s: float = 0.0  # seconds that its launches were on the device


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """What all rungs of a phase have computed since the start, those of earlier ladders included."""

    real_tokens: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromiseTotals:
    """Requests that ended well (stop or length) since the start, and what became of slo.ttft and slo.itl for each."""

    num_requests: int = 0
    num_kept: int = 0  # both
    num_ttft_missed: int = 0
    num_itl_missed: int = 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine tells about itself; counters are totals since start, times `time.monotonic()` seconds."""

    state: str  # loading, ready, draining, failed
    error: str
    uptime_s: float
    num_steps: int  # heartbeat: moves whenever work is done
    last_step_s: float
    busy_s: float  # seconds that some launch was on the device
    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_pages: int
    used_pages: int
    cached_pages: int
    page_size: int
    prompt_tokens: int
    generation_tokens: int
    cached_prompt_tokens: int
    prefix_queries: int  # tokens looked up
    prefix_hits: int  # tokens found
    num_preemptions: int
    finished: dict[str, int]  # by finish reason
    rejected: dict[str, int]  # by error code
    late_compiles: int
    rungs: tuple[RungSnapshot, ...]
    expert_tokens: tuple[tuple[int, ...], ...]  # [layer][logical expert], totals since start
    ttft_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    queue_s: Histogram
    prefill_s: Histogram
    decode_s: Histogram
    prompt_len: Histogram
    generation_len: Histogram
    host_step_s: Histogram  # host time of one launch + collect, without waiting for the device
    drain_rate_tokens_s: float  # recent tokens finished for each second, for Retry-After
    ladder_change: LadderChange
    policy: SchedulePolicy  # what steers the scheduler now
    demand: Mapping[str, Mapping[int, int]]  # by phase: positions asked for in one step -> steps, since start
    taken_s: float = 0.0  # when this was written
    page_bytes: int = 0  # of one page over all layers
    phases: Mapping[str, PhaseTotals] = field(default_factory=dict)
    promises: PromiseTotals = PromiseTotals()
    tile_misses: int = 0  # tiles that no tuning table had, looked up while steps were traced
    experts: ExpertStatus | None = None  # None on one device
    hosts: tuple[HostStatus, ...] = ()  # of an engine that spans several
    residency: ResidencyStatus | None = None  # None where all experts are resident


@dataclass(slots=True)
class RungCounters:
    """What one rung has computed; `step_s` keeps the seconds of a step in the last launches."""

    hits: int = 0
    real_tokens: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    last_s: float = 0.0  # when it was launched last

    @property
    def median_step_s(self) -> float:
        times = sorted(self.step_s)
        return times[len(times) // 2] if times else 0.0


class EngineStats:
    """The mutable side: written by the engine's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self.num_steps = 0
        self.busy_s = 0.0
        self.last_step_s = self._start_s
        self.prompt_tokens = self.generation_tokens = self.cached_prompt_tokens = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.rungs: defaultdict[str, RungCounters] = defaultdict(RungCounters)
        self._expert_tokens: np.ndarray | None = None  # [L, E] int64, without those of `_new_expert_tokens`
        self._new_expert_tokens: list[np.ndarray] = []
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.itl_s = Histogram(ITL_BOUNDS_S)
        self.e2e_s, self.queue_s, self.prefill_s, self.decode_s = (Histogram(LONG_BOUNDS_S) for _ in range(4))
        self.prompt_len, self.generation_len = Histogram(TOKEN_BOUNDS), Histogram(TOKEN_BOUNDS)
        self.host_step_s = Histogram(ITL_BOUNDS_S)
        self.demand: dict[str, Counter[int]] = {"prefill": Counter(), "decode": Counter()}
        self.phases: dict[str, PhaseTotals] = {}
        self.promises = PromiseTotals()
        self._lengths: deque[int] = deque(maxlen=512)  # prompt + output of requests that ended of late
        self._drained: deque[tuple[float, int]] = deque(maxlen=512)

    def on_step(
        self,
        rung: str,
        real_tokens: int,
        computed_tokens: int,
        launch_s: float,
        num_steps: int = 1,
        is_usual: bool = True,
    ) -> None:
        """A launch of `num_steps` steps was read: positions asked for, computed, seconds that the device was at it.

        is_usual: its time tells of the rung's steps to come.
        """
        counters = self.rungs[rung]
        counters.hits += 1
        counters.real_tokens += real_tokens
        counters.computed_tokens += computed_tokens
        counters.busy_s += launch_s
        if is_usual:
            counters.step_s.append(launch_s / max(1, num_steps))
        self.busy_s += launch_s
        self.num_steps += 1
        self.last_step_s = counters.last_s = self._clock()

    def on_demand(self, phase: str, size: int, num_steps: int) -> None:
        """Positions that steps asked for: pages filled in prefill, rows in decode."""
        self.demand[phase][size] += num_steps

    def on_phase(self, phase: str, real_tokens: int, computed_tokens: int, busy_s: float) -> None:
        """The same launch as `on_step`, by phase: rungs come and go with the ladder."""
        t = self.phases.get(phase, PhaseTotals())
        self.phases[phase] = PhaseTotals(
            t.real_tokens + real_tokens, t.computed_tokens + computed_tokens, t.busy_s + busy_s
        )

    def on_promises(self, *, kept_ttft: bool, kept_itl: bool) -> None:
        """A request ended well: whether its time to first token and its time between tokens were as promised."""
        t = self.promises
        self.promises = PromiseTotals(
            t.num_requests + 1,
            t.num_kept + (kept_ttft and kept_itl),
            t.num_ttft_missed + (not kept_ttft),
            t.num_itl_missed + (not kept_itl),
        )

    def on_experts(self, tokens: np.ndarray) -> None:
        """Tokens of one launch by layer and expert, [L, E]; added up when they are read, or MAX_UNADDED are there."""
        self._new_expert_tokens.append(tokens)
        if len(self._new_expert_tokens) == MAX_UNADDED:
            self._add_up()

    @property
    def expert_tokens(self) -> np.ndarray | None:
        """Tokens of all launches by layer and expert, [L, E] int64; None before the first."""
        if self._new_expert_tokens:
            self._add_up()
        return self._expert_tokens

    def _add_up(self) -> None:
        new = np.sum(self._new_expert_tokens, axis=0, dtype=np.int64)
        self._expert_tokens = new if self._expert_tokens is None else self._expert_tokens + new
        self._new_expert_tokens.clear()

    def on_finish(self, reason: str, num_prompt: int, num_generated: int) -> None:
        self.finished[reason] += 1
        self.prompt_len.observe(num_prompt)
        self.generation_len.observe(num_generated)
        self._lengths.append(num_prompt + num_generated)
        self._drained.append((self._clock(), num_prompt + num_generated))

    def expected_len(self, quantile: float) -> float | None:
        """Quantile of the tokens that requests of late occupied in the end."""
        lengths = sorted(self._lengths)
        return float(lengths[int(quantile * (len(lengths) - 1))]) if lengths else None

    @property
    def drain_rate_tokens_s(self) -> float:
        """Tokens of requests finished for each second of the last minute."""
        now = self._clock()
        recent = [(t, n) for t, n in self._drained if now - t < 60]
        if len(recent) < 2:
            return 0.0
        return sum(n for _, n in recent) / max(now - recent[0][0], 1e-3)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._start_s
