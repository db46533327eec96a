"""The three ways to form batches that are compared, on one engine: static batches, one fixed rung, the controller."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.progress import Progress

from runtime.bench.adaptive_traffic import Job, with_prompts
from runtime.bench.client import RequestTimes
from runtime.bench.replay import Planned, Played, play_closed, play_open
from runtime.bench.running import RunningEngine
from runtime.bench.static_batches import play_static
from runtime.config import EngineConfig, parse_config

OPEN_PER_ROW = 2  # requests kept in the engine for each row of the largest rung when the queue is closed
_APPLY_TIMEOUT_S = 60.0


class Way(StrEnum):
    STATIC = "static"  # a batch runs to its end, nobody joins
    FIXED = "fixed"  # continuous batching on one decode rung
    DYNAMIC = "dynamic"  # the controller and the whole ladder


@dataclass(frozen=True, slots=True)
class Mode:
    """`rows`: the only decode rung, and the most sequences at once; None: all rungs."""

    way: Way
    rows: int | None = None
    timeout_s: float = 0.0

    @property
    def label(self) -> str:
        text = self.way.value if self.rows is None else f"{self.way.value} {self.rows}"
        return f"{text}, {1e3 * self.timeout_s:g} ms" if self.way is Way.STATIC else text


DYNAMIC = Mode(Way.DYNAMIC)


def changed(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration with fields, by dotted path, set anew; checked again."""
    data = config.model_dump()
    for path, value in settings.items():
        section, name = path.split(".")
        data[section][name] = value
    return parse_config(data)


def config_of_mode(config: EngineConfig, mode: Mode) -> EngineConfig:
    """Only the dynamic mode lets the controller choose; the others hold their size."""
    if mode.rows is None:
        return changed(config, {"batch_processing.enable_dynamic_batch": True})
    settings = {
        "batch_processing.enable_dynamic_batch": False,
        "batch_processing.base_batch_size": mode.rows,
    }
    return changed(config, settings)


def apply_mode(engine: RunningEngine, config: EngineConfig, mode: Mode) -> None:
    """Effective when it returns; the engine should be idle."""
    engine.loop.configure(config_of_mode(config, mode)).result(_APPLY_TIMEOUT_S)
    engine.loop.restrict_rungs(mode.rows)


@dataclass(frozen=True, slots=True)
class ModePlayer:
    """Plays jobs on the engine in any mode, under one configuration."""

    engine: RunningEngine
    config: EngineConfig
    progress: Progress

    def saturated(self, mode: Mode, jobs: list[Job], seed: int) -> tuple[Played, float]:
        """All jobs as fast as the mode takes them, and its output tokens/s."""
        played = self._play(mode, [_at_once(plan) for plan in self._plans(jobs, seed)], seed, is_open=False)
        return played, saturated_tok_s(played, mode)

    def open(self, mode: Mode, jobs: list[Job], seed: int) -> Played:
        """Each job at its own time."""
        return self._play(mode, self._plans(jobs, seed), seed, is_open=True)

    def _plans(self, jobs: list[Job], seed: int) -> list[Planned]:
        return with_prompts(jobs, self.engine.shape.vocab_size, seed)

    def _play(self, mode: Mode, plans: list[Planned], seed: int, *, is_open: bool) -> Played:
        apply_mode(self.engine, self.config, mode)
        name = f"{mode.label}, {'open' if is_open else 'saturated'} {seed}"
        if mode.way is Way.STATIC:
            assert mode.rows is not None
            task = self.progress.add_task(name, total=len(plans))
            played = play_static(self.engine, plans, mode.rows, mode.timeout_s, name, self.progress, task)
            self.progress.remove_task(task)
        elif is_open:
            played = play_open(self.engine, plans, 1.0, name, self.progress)
        else:
            num_open = OPEN_PER_ROW * self.config.batch_processing.max_batch_size
            played = play_closed(self.engine, plans, num_open, name, self.progress)
        failed = [t for t in played.times if not t.is_ok]
        if failed:
            raise RuntimeError(f"{name}: {len(failed)} requests failed, the first with {failed[0].error!r}")
        return played


def saturated_tok_s(played: Played, mode: Mode) -> float:
    """Output tokens/s while the queue was full.

    Continuous modes: between the first end of a request and the last submission, so that neither the first prefills
    nor the emptying counts. Static batches start and end empty by nature: the whole run.
    """
    if mode.way is Way.STATIC:
        return sum(t.num_tokens for t in played.times) / played.duration_s
    return steady_tok_s(played.times)


def steady_tok_s(times: tuple[RequestTimes, ...]) -> float:
    """Tokens/s between the first end and the last arrival of a closed queue."""
    start_s = min(t.finished_s for t in times if t.finished_s is not None)
    end_s = max(t.arrival_s for t in times)
    if end_s <= start_s:
        raise ValueError(f"{len(times)} requests are too few: the last came before the first had ended")
    counts = (
        n for t in times for s, n in zip(t.event_s, t.event_tokens, strict=True) if start_s < s <= end_s
    )
    return sum(counts) / (end_s - start_s)


def _at_once(plan: Planned) -> Planned:
    return Planned(0.0, plan.prompt, plan.num_new)
