"""Loaded: what the loader hands to the loop's thread."""

from dataclasses import dataclass

from runtime.engine.engine import Engine
from runtime.engine.expert_mover import ExpertMover
from runtime.engine.residency_shape import ResidencyShape
from runtime.schedule.shards import AnyScheduler


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of an engine that exist once the model is loaded."""

    engine: Engine
    scheduler: AnyScheduler
    mover: ExpertMover | None = None  # where several devices share the experts
    residency: ResidencyShape | None = None  # where experts may sleep
