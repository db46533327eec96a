"""LadderSwap: one ladder replaces another while the old one serves. Owned by the engine's thread.

Added rungs compile in the background and are warmed up one a turn; when all are ready, the ladder is replaced between
two steps. One that fails ends the change: the old ladder stays and the error names it. The executables of the ladder
before are kept until the next change, so that taking a change back takes no compile.
"""

import time
from collections.abc import Callable

from runtime.engine.change import LadderChange, LadderState
from runtime.engine.engine import Engine
from runtime.ladder.bucket import Bucket
from runtime.ladder.compiler import RungState
from runtime.ladder.ladder import BucketLadder


class LadderSwap:
    """At most one change at a time; a new order replaces one that still compiles."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._wanted: BucketLadder | None = None
        self._before = engine.ladder.rungs  # of the ladder before this one
        self._ordered_s = 0.0
        self.last = LadderChange(0, LadderState.STEADY)

    def order(self, ladder: BucketLadder) -> LadderChange:
        """Start the change to `ladder`; done at once when no rung is missing."""
        engine = self._engine
        add, drop = engine.ladder.diff(ladder)
        if not (add or drop or self._wanted):
            return self.last
        self._wanted, self._ordered_s = ladder, self._clock()
        engine.keep_rungs((*self._before, *engine.ladder.rungs, *ladder.rungs))
        engine.compile(b for b in ladder.compile_order() if not engine.is_warm(b))
        self.last = LadderChange(self.last.number + 1, LadderState.COMPILING, _names(add), _names(drop))
        self.turn()
        return self.last

    def turn(self) -> None:
        """Warm up one added rung, or end the change."""
        if self._wanted is None:
            return
        engine = self._engine
        missing = [b for b in self._wanted.rungs if not engine.is_warm(b)]
        for bucket in missing:
            if error := self._error_of(bucket):
                self._fail(f"rung {bucket.name} failed to compile: {error}")
                return
        ready = next((b for b in missing if engine.compiler.is_ready(b)), None)
        if ready is not None:
            try:
                engine.adopt(ready)
            except Exception as error:  # for example no memory for its scratch
                self._fail(f"rung {ready.name} failed to run: {type(error).__name__}: {str(error)[:300]}")
                return
        if len(missing) - (ready is not None) == 0:
            self._before = engine.ladder.rungs
            engine.set_ladder(self._wanted)
            engine.keep_rungs((*self._before, *self._wanted.rungs))
            self._end(LadderState.STEADY, "")

    def _error_of(self, bucket: Bucket) -> str:
        steps = [self._engine.compiler.step(name) for name in self._engine.compiler.names_of(bucket)]
        return next((s.error or "failed" for s in steps if s.state is RungState.FAILED), "")

    def _fail(self, error: str) -> None:
        self._engine.keep_rungs((*self._before, *self._engine.ladder.rungs))
        self._end(LadderState.FAILED, error)

    def _end(self, state: LadderState, error: str) -> None:
        seconds = self._clock() - self._ordered_s
        self._wanted = None
        self.last = LadderChange(
            self.last.number, state, self.last.rungs_to_add, self.last.rungs_to_drop, error, seconds
        )


def _names(buckets: tuple[Bucket, ...]) -> tuple[str, ...]:
    return tuple(b.name for b in buckets)
