"""Observation: what the controllers know of the engine at one moment. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# How whoever fills in an observation treats measured step times.
BELIEVED_FOR_S = 60.0  # since the rung ran last
MIN_LAUNCHES = 16  # of a rung, before its time is believed
SMOOTHING = 0.1  # weight of the newest step time of a phase; about the last twenty count


def smooth(mean_s: float | None, step_s: float) -> float:
    """The smoothed step time after one more."""
    return step_s if mean_s is None else mean_s + (step_s - mean_s) * SMOOTHING


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the engine. None says that a number is not known now, which is no reason to act.

    time_s: monotonic seconds when it was taken.
    oldest_wait_s: how long the oldest request that has never run has waited; 0 when none waits.
    decode_step_s, prefill_step_s: smoothed seconds of one decode step and one prefill step of late.
    decode_step_s_by_rows, prefill_step_s_by_tokens: seconds of one step by rung, for rungs that were measured.
    used_pages: held by running sequences; pages that are kept only because a prefix may come again are free.
    free_bytes, bytes_per_token: KV memory that could be given out now, and what one token takes.
    expected_len: tokens that a request will occupy in the end, a high quantile of late.
    expert_load: tokens on the busiest device over the mean of all devices, times the step's share of the ITL target;
        None on one device, where nothing can be uneven.
    exchange_s: seconds of a step spent exchanging tokens between devices; None on one device.
    decode_rungs: rows of the decode rungs that are ready, ascending.
    prefill_rungs: tokens of the prefill rungs that are ready, ascending.
    """

    time_s: float
    num_running: int
    num_waiting: int
    oldest_wait_s: float
    used_pages: int
    num_pages: int
    free_bytes: int
    bytes_per_token: int
    expected_len: float | None
    decode_step_s: float | None
    prefill_step_s: float | None
    decode_rungs: tuple[int, ...]
    prefill_rungs: tuple[int, ...]
    decode_step_s_by_rows: Mapping[int, float] = field(default_factory=dict)
    prefill_step_s_by_tokens: Mapping[int, float] = field(default_factory=dict)
    expert_load: float | None = None
    exchange_s: float | None = None
