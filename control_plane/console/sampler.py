"""Sampler: looks at the engine once a tick, whoever looks at the console, and keeps what pages and diagnosis need.

On the event loop's thread; bounded.
"""

import time
from collections import deque
from collections.abc import Callable

from control_plane.console.device_watch import DeviceWatch
from control_plane.console.history import TICK_S, History
from control_plane.console.view import Move
from control_plane.engine_handle import EngineHandle
from control_plane.finding import SnapshotHistory
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.stats import EngineSnapshot

KEPT_MOVES = 4000
DECISIONS_AT_ONCE = 1000
MAX_ROUNDS = 10  # of a tick: more decisions than that are waited for


class Sampler:
    """`tick` as often as one likes; it acts every TICK_S. clock: monotonic seconds, wall_clock: Unix."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._due_s = clock()
        self.num_ticks = 0
        self.history = History()
        self.devices = DeviceWatch()
        self.recent = SnapshotHistory()  # the snapshots that diagnosis looks at
        self.snapshot: EngineSnapshot | None = None
        self.moves: deque[Move] = deque(maxlen=KEPT_MOVES)
        self.reasons: dict[tuple[str, str], int] = {}
        self._last_decision = 0
        self._ladder: tuple[int, LadderState] = (0, LadderState.STEADY)

    def tick(self, engine: EngineHandle | None) -> None:
        """engine: None while there is none; then only the pages' age goes on."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = max(self._due_s + TICK_S, now_s)  # a late tick is not made up for
        self.num_ticks += 1
        if engine is None:
            return
        self.snapshot = snapshot = engine.snapshot()
        self.recent.add(now_s, snapshot)
        if snapshot.state != "loading":
            self.history.add(snapshot, self._wall_clock())
            if snapshot.experts is not None:
                self.devices.add(snapshot.experts, self._wall_clock())
        self._follow_decisions(engine)
        self._follow_ladder(snapshot.ladder_change)

    def data_age_s(self) -> float | None:
        """Seconds since the engine wrote the snapshot that is shown; None while it loads and writes none."""
        if self.snapshot is None or self.snapshot.state == "loading":
            return None
        return max(0.0, self._clock() - self.snapshot.taken_s)

    def _follow_decisions(self, engine: EngineHandle) -> None:
        offset_s = self._wall_clock() - self._clock()
        for _ in range(MAX_ROUNDS):
            decisions = engine.decisions(self._last_decision, DECISIONS_AT_ONCE)
            for d in decisions:
                if d.value != d.previous:
                    time_s = d.time_s + offset_s
                    self.moves.append(
                        Move(time_s, d.number, d.controller, d.previous, d.value, d.reason, d.inputs)
                    )
            if decisions:
                self._last_decision = decisions[-1].number
            if len(decisions) < DECISIONS_AT_ONCE:
                break
        self.reasons = engine.decision_counts()

    def _follow_ladder(self, change: LadderChange) -> None:
        if (change.number, change.state) == self._ladder:
            return
        self._ladder = (change.number, change.state)
        inputs = {
            "rungs_to_add": len(change.rungs_to_add),
            "rungs_to_drop": len(change.rungs_to_drop),
            "seconds": change.seconds,
        }
        reason = f"{change.state}: {change.error}" if change.error else str(change.state)
        self.moves.append(Move(self._wall_clock(), 0, "ladder", None, None, reason, inputs))
