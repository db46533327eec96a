"""count_step: what a launch that was read says to the statistics, the controllers and the balancer."""

from runtime.engine.engine import CollectedStep, InFlightStep
from runtime.engine.stats import EngineStats
from runtime.engine.steering import Steering
from runtime.schedule.plan import Phase


def count_step(
    stats: EngineStats, steering: Steering | None, step: InFlightStep, collected: CollectedStep, busy_s: float
) -> None:
    """busy_s: seconds that the device took for it. Called by the engine's thread."""
    phase, num_steps = step.plan.phase, max(1, collected.num_steps)
    if phase is Phase.PREFILL:
        real, computed = step.plan.num_tokens, step.bucket.tokens
    else:
        real = sum(map(len, collected.result.token_ids))
        computed = step.bucket.tokens * collected.num_steps
    is_usual = steering is None or steering.is_in_serving_form(step)
    stats.on_step(step.bucket.name, real, computed, busy_s, num_steps, is_usual)
    stats.on_phase(phase.value, real, computed, busy_s)
    stats.on_demand(phase.value, step.size, num_steps)
    stats.on_experts(collected.expert_tokens)
    if steering is not None:
        step_s = busy_s / num_steps
        if is_usual:
            steering.on_step(phase, step_s)
        steering.on_experts(step.plan, collected, num_steps, step_s)
        steering.on_form(step, collected, step_s)
