"""take_snapshot: everything that the engine tells about itself, as one frozen record."""

import time

from pallas_kernels.tuning import num_tile_misses
from runtime.engine.admission import AdmissionGate
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.engine import Engine
from runtime.engine.loaded import Loaded
from runtime.engine.stats import EngineSnapshot, EngineStats, RungCounters, RungSnapshot
from runtime.engine.steering import Steering
from runtime.ladder.late_compiles import monitor
from runtime.schedule.policy import SchedulePolicy

NO_CHANGE = LadderChange(0, LadderState.STEADY)


def take_snapshot(
    stats: EngineStats,
    loaded: Loaded | None,
    state: str,
    error: str,
    gate: AdmissionGate,
    steering: Steering | None,
) -> EngineSnapshot:
    """Called by the engine's thread, or before it starts."""
    change = steering.ladder_change if steering is not None else NO_CHANGE
    balancing = steering.balancing if steering is not None else None
    residency = steering.residency if steering is not None else None
    scheduler = loaded.scheduler if loaded is not None else None
    expert_tokens = () if stats.expert_tokens is None else tuple(map(tuple, stats.expert_tokens.tolist()))
    return EngineSnapshot(
        state=state,
        error=error,
        uptime_s=stats.uptime_s,
        num_steps=stats.num_steps,
        last_step_s=stats.last_step_s,
        busy_s=stats.busy_s,
        num_running=scheduler.num_running if scheduler is not None else 0,
        num_waiting=gate.num_waiting,
        waiting_tokens=gate.waiting_tokens,
        num_pages=loaded.engine.num_pages if loaded is not None else 0,
        used_pages=scheduler.num_used_pages if scheduler is not None else 0,
        cached_pages=scheduler.num_cached_pages if scheduler is not None else 0,
        page_size=scheduler.page_size if scheduler is not None else 0,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        prefix_queries=scheduler.prefix_queries if scheduler is not None else 0,
        prefix_hits=scheduler.prefix_hits if scheduler is not None else 0,
        num_preemptions=scheduler.num_preemptions if scheduler is not None else 0,
        finished=dict(stats.finished),
        rejected=dict(stats.rejected) | {"rate_limit_exceeded": gate.num_rejected},
        late_compiles=monitor.num_late,
        rungs=_rungs(stats, loaded.engine) if loaded is not None else (),
        expert_tokens=expert_tokens,
        ttft_s=stats.ttft_s.copy(),
        itl_s=stats.itl_s.copy(),
        e2e_s=stats.e2e_s.copy(),
        queue_s=stats.queue_s.copy(),
        prefill_s=stats.prefill_s.copy(),
        decode_s=stats.decode_s.copy(),
        prompt_len=stats.prompt_len.copy(),
        generation_len=stats.generation_len.copy(),
        host_step_s=stats.host_step_s.copy(),
        drain_rate_tokens_s=stats.drain_rate_tokens_s,
        ladder_change=change,
        policy=scheduler.policy if scheduler is not None else SchedulePolicy(),
        demand={phase: dict(sizes) for phase, sizes in stats.demand.items()},
        experts=balancing.status() if balancing is not None else None,
        residency=residency.status() if residency is not None else None,
        taken_s=time.monotonic(),
        page_bytes=loaded.engine.page_bytes if loaded is not None else 0,
        phases=dict(stats.phases),
        promises=stats.promises,
        tile_misses=num_tile_misses() if loaded is not None else 0,
    )


def _rungs(stats: EngineStats, engine: Engine) -> tuple[RungSnapshot, ...]:
    snapshots = []
    for bucket in engine.ladder.rungs:
        step = engine.compiler.step(bucket.name)
        counters = stats.rungs.get(bucket.name, RungCounters())
        snapshots.append(
            RungSnapshot(
                name=bucket.name,
                phase=bucket.phase.value,
                size=bucket.tokens,
                state=step.state.value,
                compile_s=step.compile_s,
                from_cache=step.from_cache,
                temp_bytes=step.temp_bytes,
                hits=counters.hits,
                real_tokens=counters.real_tokens,
                computed_tokens=counters.computed_tokens,
                step_s=counters.median_step_s,
                error=step.error,
                scope_shares=engine.scope_shares.get(bucket.name, {}),
                busy_s=counters.busy_s,
            )
        )
    return tuple(snapshots)
