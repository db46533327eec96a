"""The configuration side of the fake engine: a real diff, a ladder by rule, compiles that end when the test says so."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from runtime.adaptive.decision import DecisionLog
from runtime.config import EngineConfig
from runtime.engine.change import Applied, ChangeKind, ConfigChange, LadderChange, LadderState
from runtime.engine.reconfigure import diff_fields, with_restart_fields_of
from runtime.errors import InvalidRequest, Unavailable
from runtime.schedule.policy import SchedulePolicy

ROW_SLOTS = 64


class FakeConfiguration:
    """`compiles_at_once`: a change of the ladder is done before `configure` returns; otherwise by `end_compile`."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.compiles_at_once = True
        self.is_stuck = False  # takes no configuration
        self.refuses: Exception | None = None  # raised by `configure`
        self.taken: list[EngineConfig] = []
        self.ladder_change = LadderChange(0, LadderState.STEADY)
        self.decisions = DecisionLog(1024)
        self._serving = _rungs(self.config)
        self._lock = threading.Lock()

    def start_with(self, config: EngineConfig) -> None:
        self.config, self._serving = config, _rungs(config)

    @property
    def policy(self) -> SchedulePolicy:
        batch = self.config.batch_processing
        return SchedulePolicy(batch_size=batch.base_batch_size, micro_batch_size=batch.micro_batch_size)

    def plan(self, config: EngineConfig, must_start: bool = True) -> ConfigChange:
        rows = config.batch_processing.max_batch_size
        if rows > ROW_SLOTS:
            raise InvalidRequest(
                f"batch_processing.max_batch_size is {rows}; the device has room for {ROW_SLOTS} rows",
                param="batch_processing.max_batch_size",
            )
        fields = diff_fields(self.config, config)
        wanted = _rungs(with_restart_fields_of(self.config, config))
        add = tuple(rung for rung in wanted if rung not in self._serving)
        drop = tuple(rung for rung in self._serving if rung not in wanted)
        late = [change.path for change in fields if change.kind is ChangeKind.RESTART]
        warnings = tuple(f"{path} takes effect when the server is started again" for path in late)
        return ConfigChange(fields, add, drop, 1.5 * len(add), 1024 * len(add), warnings)

    def configure(self, config: EngineConfig, state: str, num_steps: int) -> Future[Applied]:
        change = self.plan(config)
        if state != "ready":
            raise Unavailable(f"The engine is {state}.", retry_after_s=2)
        if self.refuses is not None:
            raise self.refuses
        done: Future[Applied] = Future()
        if self.is_stuck:
            return done
        with self._lock:
            self.config = with_restart_fields_of(self.config, config)
            self.taken.append(self.config)
            if change.rungs_to_add or change.rungs_to_drop:
                number = self.ladder_change.number + 1
                self.ladder_change = LadderChange(
                    number, LadderState.COMPILING, change.rungs_to_add, change.rungs_to_drop
                )
            if self.compiles_at_once:
                self._end_compile("")
            done.set_result(Applied(num_steps, 0.0, self.ladder_change))
        return done

    def end_compile(self, error: str = "") -> None:
        """The rungs that compile are ready, or one of them has failed."""
        with self._lock:
            self._end_compile(error)

    def decide(self, controller: str, reason: str, previous: float, value: float) -> None:
        self.decisions.add(time.monotonic(), controller, previous, value, reason, {"load": 0.5})

    def _end_compile(self, error: str) -> None:
        if self.ladder_change.state is not LadderState.COMPILING:
            return
        state = LadderState.FAILED if error else LadderState.STEADY
        self.ladder_change = replace(self.ladder_change, state=state, error=error)
        if not error:
            self._serving = _rungs(self.config)


def _rungs(config: EngineConfig) -> Sequence[str]:
    rows = config.ladder.decode_rows or (config.batch_processing.max_batch_size,)
    tokens = config.ladder.prefill_tokens or (config.ladder.max_prefill_tokens,)
    return [*(f"decode-{n}" for n in rows), *(f"prefill-{n}" for n in tokens)]
