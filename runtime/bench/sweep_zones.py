"""Zones of a batch-size sweep: where more rows are nearly free, where they stop paying, where latency takes over.

Pure functions of (batch, step latency, tokens/s). Sizes are rarely neighbours in a power of two, so every step from one
size to the next is judged by its gain per doubling: (tokens/s ratio) ** (1 / log2(batch ratio)) - 1. 100 % means that
tokens/s grow in proportion to the rows, 0 % that they do not grow. Imports no JAX.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

# Three quarters of proportional growth: a doubling makes the step at most 14 % longer (2 / 1.75).
SMALL_GAIN = 0.75
# Below sqrt(2) - 1 a doubling lengthens the step by more than it raises tokens/s, because the two ratios multiply to 2.
LARGE_GAIN = math.sqrt(2) - 1
# Within this of nothing, tokens/s are flat: the spread between rounds is rarely smaller.
FLAT_GAIN = 0.05


class Zone(StrEnum):
    """What a step to the next batch size buys."""

    SMALL = "small"  # rows nearly free: tokens/s grow about in proportion
    FAIR = "fair"  # tokens/s grow faster than latency
    LARGE = "large"  # latency grows faster than tokens/s
    NO_GAIN = "no-gain"  # tokens/s flat or falling


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One batch size as measured: seconds of a decode step and tokens/s of all rows together."""

    batch: int
    step_s: float
    tokens_s: float


@dataclass(frozen=True, slots=True)
class SizeStep:
    """The step between two neighbouring batch sizes; the ratios are per doubling of the rows, less one."""

    start: int
    end: int
    gain: float
    latency_growth: float
    tokens_s_per_added_row: float
    zone: Zone


@dataclass(frozen=True, slots=True)
class Zones:
    """`small_until`: last size reached through small steps alone. `fair_until`: last size before the first step
    that is neither small nor fair. `large_from`, `no_gain_from`: size from which no later step is better than that;
    None when the sweep ended before. A size may lie before `large_from` and yet follow a large step: a dip.
    """

    steps: tuple[SizeStep, ...]
    small_until: int
    fair_until: int
    large_from: int | None
    no_gain_from: int | None

    @property
    def dips(self) -> tuple[SizeStep, ...]:
        """Large or no-gain steps that a better step follows: sizes to step over."""
        end = self.large_from or math.inf
        return tuple(s for s in self.steps if s.zone in (Zone.LARGE, Zone.NO_GAIN) and s.start < end)


def find_zones(points: Sequence[BatchPoint]) -> Zones:
    """Zones of a sweep in ascending batch sizes. Raises ValueError on other orders and on numbers of zero or less."""
    if not points or any(p.batch < 1 or p.step_s <= 0 or p.tokens_s <= 0 for p in points):
        raise ValueError("zones need at least one batch size, with latency and tokens/s above zero")
    if any(a.batch >= b.batch for a, b in pairwise(points)):
        raise ValueError(f"batch sizes must ascend, got {[p.batch for p in points]}")
    steps = tuple(_judge(a, b) for a, b in pairwise(points))
    return Zones(
        steps=steps,
        small_until=_reached(points[0].batch, steps, {Zone.SMALL}),
        fair_until=_reached(points[0].batch, steps, {Zone.SMALL, Zone.FAIR}),
        large_from=_from(steps, {Zone.LARGE, Zone.NO_GAIN}),
        no_gain_from=_from(steps, {Zone.NO_GAIN}),
    )


def zone_of(gain: float) -> Zone:
    """The zone of a gain per doubling."""
    if gain <= FLAT_GAIN:
        return Zone.NO_GAIN
    if gain < LARGE_GAIN:
        return Zone.LARGE
    return Zone.FAIR if gain < SMALL_GAIN else Zone.SMALL


def _judge(a: BatchPoint, b: BatchPoint) -> SizeStep:
    doublings = math.log2(b.batch / a.batch)
    gain = (b.tokens_s / a.tokens_s) ** (1 / doublings) - 1
    growth = (b.step_s / a.step_s) ** (1 / doublings) - 1
    return SizeStep(
        a.batch, b.batch, gain, growth, (b.tokens_s - a.tokens_s) / (b.batch - a.batch), zone_of(gain)
    )


def _reached(first: int, steps: Sequence[SizeStep], zones: set[Zone]) -> int:
    """The last size that an unbroken run of such steps reaches from the first."""
    for step in steps:
        if step.zone not in zones:
            return step.start
        first = step.end
    return first


def _from(steps: Sequence[SizeStep], zones: set[Zone]) -> int | None:
    """Where the unbroken run of such steps begins that ends the sweep."""
    start = None
    for step in reversed(steps):
        if step.zone not in zones:
            break
        start = step.start
    return start
