"""Snapshots of an engine that has the default ladder and has done nothing."""

from dataclasses import fields
from typing import Any

from runtime.config import EngineConfig, parse_config
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.stats import LONG_BOUNDS_S, EngineSnapshot, Histogram, RungSnapshot
from runtime.ladder.ladder import BucketLadder
from runtime.schedule.policy import SchedulePolicy


def rungs_of(config: EngineConfig) -> tuple[RungSnapshot, ...]:
    return tuple(
        RungSnapshot(b.name, b.phase.value, b.tokens, "ready", 1.0, False, 0, 0, 0, 0, 0.01)
        for b in BucketLadder.from_config(config, max_context=2048).rungs
    )


def snapshot_of(config: EngineConfig | None = None, **facts: Any) -> EngineSnapshot:
    known = {
        "state": "ready", "error": "", "num_pages": 100, "page_size": 16, "finished": {}, "rejected": {},
        "rungs": rungs_of(config or parse_config({})), "expert_tokens": (),
        "ladder_change": LadderChange(0, LadderState.STEADY), "policy": SchedulePolicy(),
        "demand": {"prefill": {}, "decode": {}},
    }  # fmt: skip
    rest = {
        f.name: Histogram(LONG_BOUNDS_S) if f.type in (Histogram, "Histogram") else 0
        for f in fields(EngineSnapshot)
    }
    return EngineSnapshot(**rest | known | facts)
