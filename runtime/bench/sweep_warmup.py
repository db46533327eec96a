"""What warm-up saves: the first launch of a rung against its later ones.

The engine has no switch for it (`Engine.warm_up` is always called before a rung serves). For prefill this loads a
second engine without a loop and calls `warm_up` on rungs that nothing has touched: the first call takes what a
first request would have paid without it, the later ones what it pays with it. A decode rung is warmed up with zero steps, so
its first launch is looked at in the served engine, after warm-up: what is left of the difference was not saved. Above
two prefill steps of rows the rung has already run when the last row joins, so nothing is left to see there.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.bench.driven import load
from runtime.bench.running import DEMO_MODEL, READY_TIMEOUT_S, RunningEngine
from runtime.bench.sweep_measure import burst
from runtime.config import EngineConfig

LATER_LAUNCHES = 4
_DECODE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class FirstDecode:
    """Seconds of the first launch of `batch` rows in a warmed-up engine, and of the median of later first launches."""

    batch: int
    first_s: float
    later_s: float


@dataclass(frozen=True, slots=True)
class FirstLaunch:
    """One rung: seconds of its first launch, of the median of the next ones, and of compiling it or loading it."""

    rung: str
    first_s: float
    later_s: float
    compile_s: float
    is_from_cache: bool


def first_launches(config: EngineConfig) -> list[FirstLaunch]:
    """Every prefill rung, ascending; the very first one also pays for what all rungs share."""
    path = Path(config.model.path) if config.model.path else DEMO_MODEL
    engine = load(config, path).engine
    try:
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while not engine.compiler.is_settled:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"rungs still compile after {READY_TIMEOUT_S:g} s")
            time.sleep(0.05)
        found = []
        for bucket in engine.ladder.prefill:
            seconds = []
            for _ in range(1 + LATER_LAUNCHES):
                start_s = time.perf_counter()
                engine.warm_up(bucket)
                seconds.append(time.perf_counter() - start_s)
            step = engine.compiler.step(bucket.name)
            found.append(
                FirstLaunch(
                    bucket.name, seconds[0], statistics.median(seconds[1:]), step.compile_s, step.from_cache
                )
            )
        return found
    finally:
        engine.compiler.shutdown()


def first_decodes(engine: RunningEngine, batches: Sequence[int]) -> list[FirstDecode]:
    """Ascending batch sizes of a ready engine that has decoded nothing yet."""
    found = []
    for batch in batches:
        seconds = []
        for again in range(4):
            times = burst(
                engine, batch, 16, _DECODE_TOKENS, f"touch-{batch}-{again}", seed=batch * 10 + again
            )
            last = max(times, key=lambda t: t.event_s[0])  # from its prefill on all rows decode
            seconds.append(last.event_s[1] - last.event_s[0])
        found.append(FirstDecode(batch, seconds[0], statistics.median(seconds[1:])))
    return found
