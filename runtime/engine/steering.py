"""Steering: what moves the engine's numbers between two steps. Owned by the engine's thread.

Holds the configuration in force, the controllers, and the ladder's change. Each turn costs microseconds: the
controllers look at the engine only when one of their windows has passed.
"""

import math
import time
from collections.abc import Callable, Iterator

from runtime.adaptive.controller import Controller
from runtime.adaptive.decision import DecisionLog
from runtime.adaptive.observation import BELIEVED_FOR_S, MIN_LAUNCHES, Observation, smooth
from runtime.config import EngineConfig
from runtime.engine.admission import AdmissionGate
from runtime.engine.balancing import ExpertBalancing
from runtime.engine.change import LadderChange
from runtime.engine.engine import CollectedStep, Engine, InFlightStep
from runtime.engine.expert_mover import ExpertMover
from runtime.engine.expert_residency import ExpertResidency
from runtime.engine.ladder_swap import LadderSwap
from runtime.engine.reconfigure import Envelope, fitting_ladder
from runtime.engine.residency_shape import ResidencyShape
from runtime.engine.stats import EngineStats
from runtime.engine.traffic_mix import TrafficMix
from runtime.errors import InvalidRequest
from runtime.ladder.bucket import Bucket
from runtime.ladder.learned import RungCost
from runtime.schedule.plan import Phase, StepPlan
from runtime.schedule.policy import limit_burst
from runtime.schedule.shards import AnyScheduler


class Steering:
    """Moves what may move, between two steps."""

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        scheduler: AnyScheduler,
        stats: EngineStats,
        gate: AdmissionGate,
        decisions: DecisionLog,
        clock: Callable[[], float] = time.monotonic,
        mover: ExpertMover | None = None,
        residency: ResidencyShape | None = None,
    ) -> None:
        self.config = config
        self._mix = TrafficMix(lambda: tuple(scheduler.sequences.values()))
        self.balancing = (
            ExpertBalancing(
                config,
                mover,
                decisions,
                clock,
                forget_prefixes=scheduler.clear_prefix_cache,
                end_mix=self._mix.end_window,
            )
            if mover is not None
            else None
        )
        self.residency = (
            ExpertResidency(config, engine, residency, decisions, clock) if residency is not None else None
        )
        self._engine, self._scheduler, self._stats, self._gate = engine, scheduler, stats, gate
        self._clock, self._decisions = clock, decisions
        self._controller = Controller(config, decisions, clock)
        self._swap = LadderSwap(engine, clock)
        self._decode_step_s: float | None = None
        self._prefill_step_s: float | None = None
        self._looked_s = -math.inf  # when the controllers looked last
        self._decoded_s = -math.inf  # when a decode step was read last
        self._put_in_force(config)

    @property
    def ladder_change(self) -> LadderChange:
        return self._swap.last

    @property
    def is_planning(self) -> bool:
        """An operator waits for a plan, of which each turn makes a part."""
        return self.balancing is not None and self.balancing.is_planning

    @property
    def envelope(self) -> Envelope:
        engine = self._engine
        return Envelope(engine.num_row_slots, engine.max_prefill_tokens, self._scheduler.max_context)

    def configure(self, config: EngineConfig) -> LadderChange:
        """Take over `config`, whose `restart` fields are those of now; what it needs compiled is ordered.

        Raises InvalidRequest, and changes nothing, when it does not fit into the envelope.
        """
        ladder = fitting_ladder(config, self.envelope)
        self.config = config
        self._put_in_force(config)
        return self._swap.order(ladder)

    def turn(self, now_s: float) -> None:
        """Between two steps: adopt a rung of the next ladder, let the controllers look."""
        self._swap.turn()
        self._engine.forms.tell(self._decisions, now_s)
        if self.balancing is not None:
            self.balancing.turn(now_s, self._step_share(now_s))
        if self.residency is not None:
            self.residency.turn(now_s)
        if not self._controller.is_due(now_s):
            return
        # An idle engine gives nothing to decide about waiting: one look a window of the batch size is enough.
        window_s = self.config.batch_processing.dynamic_adjust_window
        if self._scheduler.is_idle and now_s - self._looked_s < window_s:
            return
        self._looked_s = now_s
        self._scheduler.policy = self._controller.tick(self.observe(now_s), now_s)

    def on_step(self, phase: Phase, step_s: float) -> None:
        """A launch was read; `step_s` seconds for each of its steps."""
        if phase is Phase.PREFILL:
            self._prefill_step_s = smooth(self._prefill_step_s, step_s)
            return
        self._decode_step_s = smooth(self._decode_step_s, step_s)
        self._decoded_s = self._clock()
        self._limit_burst()

    def require_balancing(self) -> ExpertBalancing:
        """Raises InvalidRequest on one device."""
        if self.balancing is None:
            raise InvalidRequest(
                "parallel.expert_parallel_size is 1: on one device there is nothing to move",
                param="rebalance",
            )
        return self.balancing

    def on_experts(self, plan: StepPlan, collected: CollectedStep, num_steps: int, step_s: float) -> None:
        """What the same launch asked of the experts."""
        if self.balancing is not None:
            self._mix.on_step(plan, collected.result, num_steps)
            self.balancing.on_step(collected.expert_tokens, collected.device_rows, num_steps, step_s)
        if self.residency is not None and collected.asleep is not None:
            self.residency.on_step(collected.expert_tokens, collected.asleep, num_steps)

    def is_in_serving_form(self, step: InFlightStep) -> bool:
        """Whether its rung's steps to come take this one's form, so that its time tells of theirs."""
        return self._engine.forms.is_in_serving_form(step)

    def on_form(self, step: InFlightStep, collected: CollectedStep, step_s: float) -> None:
        """The same launch, for the judge of its rung's two forms."""
        self._engine.forms.read(step, collected, step_s)

    def _step_share(self, now_s: float) -> float | None:
        """A decode step's part of the target between tokens, if one was measured of late."""
        is_fresh = now_s - self._decoded_s <= self.config.controller.stale_after
        return (
            self._decode_step_s / self.config.slo.itl
            if self._decode_step_s is not None and is_fresh
            else None
        )

    def observe(self, now_s: float) -> Observation:
        """What the controllers may know."""
        engine, scheduler = self._engine, self._scheduler
        num_pages = engine.num_pages - 1  # the dummy page is nobody's
        oldest_s = scheduler.oldest_arrival_s
        is_fresh = now_s - self._decoded_s <= self.config.controller.stale_after
        return Observation(
            time_s=now_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            oldest_wait_s=max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0,
            used_pages=scheduler.num_used_pages,
            num_pages=num_pages,
            free_bytes=max(0, num_pages - scheduler.num_used_pages) * engine.page_bytes,
            bytes_per_token=max(1, engine.page_bytes // scheduler.page_size),
            expected_len=self._stats.expected_len(self.config.controller.expected_len_quantile),
            decode_step_s=self._decode_step_s if is_fresh else None,
            prefill_step_s=self._prefill_step_s,
            decode_rungs=tuple(b.rows for b in engine.usable(Phase.DECODE)),
            prefill_rungs=tuple(b.tokens for b in engine.usable(Phase.PREFILL)),
            decode_step_s_by_rows={b.rows: t for b, t in self._measured(Phase.DECODE, now_s)},
            prefill_step_s_by_tokens={b.tokens: t for b, t in self._measured(Phase.PREFILL, now_s)},
            expert_load=self.balancing.load(self._step_share(now_s)) if self.balancing is not None else None,
        )

    def _measured(self, phase: Phase, now_s: float) -> Iterator[tuple[Bucket, float]]:
        """Rungs with the time of a step, but for what is too old or too rare to be believed: so it is tried again."""
        for bucket in self._engine.usable(phase):
            counters = self._stats.rungs.get(bucket.name)
            if counters is None or now_s - counters.last_s > BELIEVED_FOR_S:
                continue
            if len(counters.step_s) >= MIN_LAUNCHES:
                yield bucket, counters.median_step_s

    def _put_in_force(self, config: EngineConfig) -> None:
        self._looked_s = -math.inf
        if self.balancing is not None:
            self.balancing.configure(config)
        if self.residency is not None:
            self.residency.config = config
        self._engine.forms.is_judging = config.parallel.judge_overlap_in_traffic
        self._controller.set_config(config)
        self._scheduler.policy = self._controller.policy
        self._scheduler.set_prefix_cache(config.kv_cache.enable_prefix_cache)
        self._gate.set_limits(config.server.max_queued_requests, config.server.max_queued_tokens)
        self._limit_burst()

    def _limit_burst(self) -> None:
        config = self.config
        steps = limit_burst(config.ladder.max_decode_steps, self._decode_step_s or 0.0, config.slo.itl)
        self._engine.set_max_decode_steps(steps)


def estimate_cost(engine: Engine, bucket: Bucket) -> RungCost:
    """From the compiled rung of the same phase that is nearest in size; any thread."""
    known = [
        (abs(other.tokens - bucket.tokens), step)
        for other in engine.ladder.of(bucket.phase)
        if (step := engine.compiler.step(other.name)).call is not None
    ]
    if not known:
        return RungCost(0.0, 0)
    _, nearest = min(known, key=lambda pair: pair[0])
    return RungCost(nearest.compile_s, nearest.temp_bytes)
