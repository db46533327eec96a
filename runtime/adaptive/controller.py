"""Controller: runs the three decisions when they are due and logs every one. Imports no JAX.

Owned by the engine's thread. It reads an Observation and replaces a SchedulePolicy; it touches neither engine nor
scheduler.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from runtime.adaptive.batch_size import BatchSizeState, decide_batch_size
from runtime.adaptive.choice import Choice, Reason
from runtime.adaptive.decision import DecisionLog
from runtime.adaptive.micro_batch import decide_micro_batch
from runtime.adaptive.observation import Observation
from runtime.adaptive.waiting import decide_waiting, follow_config
from runtime.config import EngineConfig
from runtime.schedule.policy import SchedulePolicy

BATCH_SIZE, MICRO_BATCH, INTERLEAVE = "batch_size", "micro_batch", "interleave"


class Controller:
    """Starts at base_batch_size, not at the largest rung. Too small a limit costs one dwell for each rung on the way
    up, and an idle engine climbs before anyone comes; too large a one lasts as long as the answers of those it let
    in, as none is preempted for a new limit. Rungs that are not ready yet are made up for as they get ready.
    """

    def __init__(self, config: EngineConfig, log: DecisionLog, clock: Callable[[], float]) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._state = BatchSizeState(config.batch_processing.base_batch_size)
        self._adjusted_s = self._windowed_s = -math.inf
        batch = config.batch_processing
        start = SchedulePolicy(batch_size=batch.base_batch_size, micro_batch_size=batch.micro_batch_size)
        self._policy = _within(start, config)

    @property
    def policy(self) -> SchedulePolicy:
        """What the scheduler goes by from the next step on."""
        return self._policy

    def set_config(self, config: EngineConfig) -> None:
        """Take over a changed configuration: its bounds hold at once, and all decisions are due again.

        A new base_batch_size is started from again. What was learned under other thresholds is forgotten.
        """
        old, self._config = self._config, config
        if (old.batch_processing, old.controller, old.slo) == (
            config.batch_processing,
            config.controller,
            config.slo,
        ):
            return
        before = policy = self._policy
        self._state = BatchSizeState(self._state.size, self._state.moved_s)
        base = config.batch_processing.base_batch_size
        if base != old.batch_processing.base_batch_size:
            self._state = BatchSizeState(base)
            policy = replace(policy, batch_size=base)
        self._adjusted_s = self._windowed_s = -math.inf
        self._policy = _within(policy, config)
        now_s = self._clock()
        self._record(now_s, BATCH_SIZE, before.batch_size, _by_config(self._policy.batch_size))
        self._record(now_s, MICRO_BATCH, before.micro_batch_size, _by_config(self._policy.micro_batch_size))
        prefills = self._policy.max_prefills_in_a_row
        self._record(now_s, INTERLEAVE, before.max_prefills_in_a_row, _by_config(prefills))

    def is_due(self, now_s: float) -> bool:
        """Whether `tick` has something to decide; cheap enough for every turn of the loop."""
        batch = self._config.batch_processing
        return (
            now_s - self._windowed_s >= batch.dynamic_batch_window
            or now_s - self._adjusted_s >= batch.dynamic_adjust_window
        )

    def tick(self, obs: Observation, now_s: float) -> SchedulePolicy:
        """Decide what is due, log it and return the policy."""
        batch = self._config.batch_processing
        if now_s - self._adjusted_s >= batch.dynamic_adjust_window:
            self._adjusted_s = now_s
            self._state, choice = decide_batch_size(self._state, obs, self._config, now_s)
            self._record(now_s, BATCH_SIZE, self._policy.batch_size, choice)
            self._policy = replace(self._policy, batch_size=choice.value)
        if now_s - self._windowed_s >= batch.dynamic_batch_window:
            self._windowed_s = now_s
            before = self._policy
            micro = decide_micro_batch(before.micro_batch_size, obs, self._config, now_s)
            self._record(now_s, MICRO_BATCH, before.micro_batch_size, micro)
            policy = replace(before, micro_batch_size=micro.value)
            self._policy, choice = decide_waiting(policy, obs, self._config, now_s)
            self._record(now_s, INTERLEAVE, before.max_prefills_in_a_row, choice)
        return self._policy

    def _record(self, now_s: float, controller: str, previous: int, choice: Choice) -> None:
        self._log.add(now_s, controller, previous, choice.value, choice.reason, choice.inputs)


def _within(policy: SchedulePolicy, config: EngineConfig) -> SchedulePolicy:
    """What config says without an observation; which rungs are ready is known to the next tick."""
    batch = config.batch_processing
    size, micro = policy.batch_size, policy.micro_batch_size
    if not batch.enable_dynamic_batch:
        size, micro = batch.base_batch_size, batch.micro_batch_size
    policy = replace(
        policy,
        batch_size=min(size, batch.max_batch_size),
        micro_batch_size=min(micro, batch.max_micro_batch_size),
    )
    return follow_config(policy, config)


def _by_config(value: int) -> Choice:
    return Choice(value, Reason.CONFIG, {})
