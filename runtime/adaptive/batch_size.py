"""The batch size: how many sequences may run at once, by the load of the tightest resource. Imports no JAX.

factor = 1 + alpha * (1 - load / threshold), threshold being batch_processing.expert_load_threshold.
Form `published`: base_batch_size * factor, so at most base_batch_size * (1 + alpha): with the published base of 32
and alpha of 0.2 to 0.8 never more than 57, whatever max_batch_size is. Form `current`: the factor is applied to the
current size again and again until the load reaches the threshold or a bound. docs/controllers.md compares the two.
"""

import math
from dataclasses import dataclass, replace

from runtime.adaptive.choice import Choice, Reason, is_stale
from runtime.adaptive.efficiency import better_below, is_worth
from runtime.adaptive.load import Load, Resource, largest_use, measured_use, resource_load, rows_in_use
from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig

_ROUNDING = 1e-9  # 32 * 1.5 must not count as more than 48


@dataclass(frozen=True, slots=True)
class BatchSizeState:
    """What one decision leaves for the next.

    size: the size last decided on. What is given out is this, clipped to the bounds of the moment, so a bound that
        goes away (a rung gets ready, an operator takes a change back) gives the old size back at once.
    moved_s: when load or queue last moved it.
    avoided, avoided_for: the smallest rung that load last showed to be too large, and the resource that showed it.
    """

    size: int
    moved_s: float = -math.inf
    avoided: int | None = None
    avoided_for: Resource | None = None


@dataclass(frozen=True, slots=True)
class _Band:
    """Below `low` the formula may raise the size, above `high` it may lower it. They meet when smoothing is off."""

    low: float
    high: float


def decide_batch_size(
    state: BatchSizeState, obs: Observation, config: EngineConfig, now_s: float
) -> tuple[BatchSizeState, Choice]:
    """The next state and batch size: a ready rung, except that a fixed size, and a max_batch_size below every ready
    rung, are taken as they are (a ready rung covers both)."""
    batch = config.batch_processing
    rungs = usable_rungs(obs.decode_rungs, config)
    if not rungs:
        return state, Choice(min(state.size, batch.max_batch_size), Reason.RUNG_NOT_READY, {})
    if not batch.enable_dynamic_batch:
        fixed = min(batch.base_batch_size, batch.max_batch_size, obs.decode_rungs[-1])
        return BatchSizeState(batch.base_batch_size), Choice(
            fixed, Reason.FIXED, {"base": batch.base_batch_size}
        )

    size = _at_or_below(rungs, state.size)
    load = resource_load(obs, config)
    inputs: dict[str, float | int | str | None] = {
        "size": size,
        "load": load.value if load else None,
        "resource": load.resource if load else None,
        "num_running": obs.num_running,
        "num_waiting": obs.num_waiting,
        "age_s": now_s - obs.time_s,
    }
    if is_stale(obs, config, now_s):
        return state, Choice(size, Reason.STALE, inputs)
    if load is None:
        return state, Choice(size, Reason.MISSING_DATA, inputs)

    band = _band(config)
    factor = 1 + batch.alpha * (1 - load.value / batch.expert_load_threshold)
    target, reason = _target(size, factor, load.value, rungs, obs, config)
    inputs |= {"factor": factor, "low": band.low, "high": band.high, "target": target}
    if target > size:
        target, reason = _largest_safe(size, target, reason, rungs, state, obs, config)
    elif target < size and batch.smoothing and _may_suffice(size, load, obs, config):
        target, reason = size, Reason.DRAINING
    better = _better(size, rungs, obs, config)
    if better is not None and better < target:
        target, reason = better, Reason.NO_GAIN
    if target != size and batch.smoothing and now_s - state.moved_s < config.controller.dwell:
        target, reason = size, Reason.DWELL
    if target == size:
        return state, Choice(size, reason, inputs)
    if reason is Reason.NO_GAIN:
        return replace(state, size=target, moved_s=now_s), Choice(target, reason, inputs)
    return _move(state, size, target, load, obs, config, now_s), Choice(target, reason, inputs)


def usable_rungs(ready: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    """Ready rungs within the bounds, ascending; where all are larger, the one bound that must hold; none if none
    is ready."""
    if not ready:
        return ()
    bound = _bound(config)
    return tuple(r for r in ready if r <= bound) or (min(ready[0], config.batch_processing.max_batch_size),)


def _bound(config: EngineConfig) -> int:
    batch = config.batch_processing
    if config.controller.form == "published":
        return min(batch.max_batch_size, int(batch.base_batch_size * (1 + batch.alpha) + _ROUNDING))
    return batch.max_batch_size


def _band(config: EngineConfig) -> _Band:
    batch, controller = config.batch_processing, config.controller
    if not batch.smoothing:
        return _Band(batch.expert_load_threshold, batch.expert_load_threshold)
    return _Band(
        controller.up_below * batch.expert_load_threshold, controller.down_above * batch.expert_load_threshold
    )


def _target(
    size: int, factor: float, load: float, rungs: tuple[int, ...], obs: Observation, config: EngineConfig
) -> tuple[int, Reason]:
    """The rung that formula and queue ask for, before it is known whether it is safe.

    The current form goes up to the rung at or above the wanted size, as otherwise a factor of 1.05 would never move
    a size of 2; down, and in the published form both ways, it is the rung at or below.
    """
    batch, band = config.batch_processing, _band(config)
    if config.controller.form == "published":
        formula = _at_or_below(rungs, batch.base_batch_size * factor)
        queue = _next_above(rungs, formula)
    else:
        formula = _at_or_above(rungs, size * factor) if factor > 1 else _at_or_below(rungs, size * factor)
        queue = _next_above(rungs, size)
    if batch.smoothing:
        formula = max(formula, _at_or_below(rungs, size / 2))  # one slow step must not close the door
        if (formula > size and load >= band.low) or (formula < size and load <= band.high):
            formula = size
    has_queue = obs.num_waiting > 0 and load <= band.high
    target = max(formula, queue) if has_queue else formula
    if target < size:
        return target, Reason.LOAD_HIGH if load > band.high else Reason.AS_WANTED
    if target > size:
        if formula <= size:
            return target, Reason.QUEUE
        is_unused = obs.num_waiting == 0 and 2 * obs.num_running < size
        return target, Reason.LOAD_LOW_UNUSED if is_unused else Reason.LOAD_LOW
    if load > band.high:
        return size, Reason.AT_MIN if size == rungs[0] else Reason.AS_WANTED
    if load < band.low or has_queue:
        if size < rungs[-1]:
            return size, Reason.AS_WANTED
        return size, Reason.RUNG_NOT_READY if obs.decode_rungs[-1] < _bound(config) else Reason.AT_MAX
    return size, Reason.IN_BAND


def _largest_safe(
    size: int,
    target: int,
    reason: Reason,
    rungs: tuple[int, ...],
    state: BatchSizeState,
    obs: Observation,
    config: EngineConfig,
) -> tuple[int, Reason]:
    """The largest rung up to `target` that nothing speaks against; `size` and why if there is none."""
    why_not: Reason | None = None
    for rung in reversed([r for r in rungs if size < r <= target]):
        why_not = _objection(rung, size, state, obs, config)
        if why_not is None:
            return rung, reason
    return size, why_not or reason


def _objection(
    rung: int, size: int, state: BatchSizeState, obs: Observation, config: EngineConfig
) -> Reason | None:
    """A rung is too slow if a step was measured, there or at a rung on the way, that would drive the size down
    again. One from which load has driven it down must promise more: to end below the band, so that nothing moves to
    and fro at its edge.

    A measurement may be old. What the step takes now, in proportion to rows, is an upper bound, so a measurement
    above it is not believed.
    """
    band = _band(config)
    on_the_way = (r for r in obs.decode_rungs if size < r <= rung)
    if any(use > band.high for r in on_the_way if (use := _step_use(r, obs, config)) is not None):
        return Reason.STEP_TOO_SLOW
    is_ruled = config.controller.form == "current" and rung > config.batch_processing.base_batch_size
    if is_ruled and not is_worth(obs.decode_step_s_by_rows, obs.decode_rungs, size, rung):
        return Reason.NO_GAIN
    if not config.batch_processing.smoothing or state.avoided is None or rung < state.avoided:
        return None
    resource = state.avoided_for or Resource.STEP_TIME
    use = _step_use(rung, obs, config) if resource is Resource.STEP_TIME else None
    if use is None:
        use = largest_use(obs, config, resource, rung)
    return None if use is not None and use < band.low else Reason.DRIVEN_DOWN


def _better(size: int, rungs: tuple[int, ...], obs: Observation, config: EngineConfig) -> int | None:
    """A smaller rung that computes clearly more rows a second, not below base_batch_size: what was measured at one
    moment must not talk the engine into serving hardly anybody."""
    base = config.batch_processing.base_batch_size
    if config.controller.form != "current" or size <= base:
        return None
    better = better_below(obs.decode_step_s_by_rows, rungs, size)
    return None if better is None else next((r for r in rungs if max(better, base) <= r < size), None)


def _step_use(rung: int, obs: Observation, config: EngineConfig) -> float | None:
    """Share of the target that a step of a measured rung takes; None if the rung was not measured."""
    measured = measured_use(obs, config, rung)
    bound = largest_use(obs, config, Resource.STEP_TIME, rung)
    return measured if measured is None or bound is None else min(measured, bound)


def _may_suffice(size: int, load: Load, obs: Observation, config: EngineConfig) -> bool:
    """Whether rows above the size are still running and the load may come down as they leave. To go on lowering
    the size until they have left would end far below what the load asks for."""
    rows = rows_in_use(obs, load.resource)
    return obs.num_running > size and load.value * size / rows <= _band(config).high


def _move(
    state: BatchSizeState,
    size: int,
    target: int,
    load: Load,
    obs: Observation,
    config: EngineConfig,
    now_s: float,
) -> BatchSizeState:
    """A rung is to blame for the load only if it ran. Use falls at most in proportion to rows, so the rungs below
    that would still be above the band by that measure are avoided with it."""
    moved = replace(state, size=target, moved_s=now_s)
    rows = rows_in_use(obs, load.resource)
    if not config.batch_processing.smoothing or (target > size and target >= (state.avoided or 0)):
        return replace(moved, avoided=None, avoided_for=None)
    if target > size or _at_or_above(obs.decode_rungs, obs.num_running) < size:
        return moved
    too_large = (r for r in obs.decode_rungs if load.value * r / rows > _band(config).high)
    avoided = min(next(too_large, size), size if state.avoided is None else state.avoided)
    return replace(moved, avoided=avoided, avoided_for=load.resource)


def _at_or_below(rungs: tuple[int, ...], size: float) -> int:
    return max((r for r in rungs if r <= size + _ROUNDING), default=rungs[0])


def _at_or_above(rungs: tuple[int, ...], size: float) -> int:
    return next((r for r in rungs if r >= size - _ROUNDING), rungs[-1])


def _next_above(rungs: tuple[int, ...], rung: int) -> int:
    return next((r for r in rungs if r > rung), rungs[-1])
