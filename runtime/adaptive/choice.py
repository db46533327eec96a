"""Choice: what a controller says, with the named reason and the numbers behind it. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig

Inputs = Mapping[str, float | int | str | None]  # plain numbers and words, for the log


class Reason(StrEnum):
    """Why a number is what it is; docs/controllers.md explains each."""

    # all controllers
    FIXED = "fixed"
    CONFIG = "config"
    STALE = "stale"
    MISSING_DATA = "missing_data"
    AT_MAX = "at_max"
    AT_MIN = "at_min"
    # batch size: moves
    LOAD_LOW = "load_low"
    LOAD_LOW_UNUSED = "load_low_unused"
    LOAD_HIGH = "load_high"
    QUEUE = "queue"
    # batch size: holds (no_gain moves down too)
    IN_BAND = "in_band"
    AS_WANTED = "as_wanted"
    DWELL = "dwell"
    DRAINING = "draining"
    DRIVEN_DOWN = "driven_down"
    STEP_TOO_SLOW = "step_too_slow"
    NO_GAIN = "no_gain"
    RUNG_NOT_READY = "rung_not_ready"
    # micro-batch
    MEMORY = "memory"
    # prefill between decodes
    NOTHING_DECODES = "nothing_decodes"
    URGENT = "urgent"
    PRESSING = "pressing"
    GAP_FITS = "gap_fits"
    GAP_TOO_LONG = "gap_too_long"


@dataclass(frozen=True, slots=True)
class Choice:
    """The number chosen, why, and what the choice rests on, by name."""

    value: int
    reason: Reason
    inputs: Inputs


def is_stale(obs: Observation, config: EngineConfig, now_s: float) -> bool:
    """Whether the observation is too old to act on."""
    return not now_s - obs.time_s <= config.controller.stale_after
