"""Paired comparisons: runs in ABBA order, ratios within a pair, their median with a bootstrap interval. Imports no JAX.

Two runs of a pair stand next to each other in time, so what drifts on a shared machine touches both; the order turns
round from pair to pair, so a steady drift favours neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with the 95 % interval of the percentile bootstrap (Efron 1979)."""

    median: float
    low: float
    high: float

    def rounded(self, digits: int = 4) -> dict[str, float]:
        return {key: round(getattr(self, key), digits) for key in ("median", "low", "high")}


def abba_order[T](names: Sequence[T], num_rounds: int) -> list[tuple[T, ...]]:
    """Each round holds every name once; every second round is reversed: A B, B A, A B, ..."""
    forward, backward = tuple(names), tuple(reversed(names))
    return [backward if i % 2 else forward for i in range(num_rounds)]


def paired_ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ours over the other, pair by pair. Raises ValueError when they do not pair up or another's figure is zero."""
    if len(ours) != len(others) or not ours:
        raise ValueError(
            f"{len(ours)} and {len(others)} figures: pairs need as many of each, and at least one"
        )
    if any(other <= 0 for other in others):
        raise ValueError(f"a ratio over {min(others):g}: the other's figures must be above zero")
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def bootstrap_median(values: Sequence[float], seed: int = 0, share: float = 0.95) -> Interval:
    """Median, and the range that holds `share` of the medians of resamples with replacement."""
    if not values:
        raise ValueError("no values: a median needs at least one")
    data = np.asarray(values, float)
    picks = np.random.default_rng(seed).integers(len(data), size=(NUM_RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - share) / 2, (1 + share) / 2])
    return Interval(float(np.median(data)), float(low), float(high))


def window_swing(windows: Sequence[float]) -> float | None:
    """Largest distance of a window's figure from the median of all, as a share of it; None below two windows."""
    if len(windows) < 2:
        return None
    middle = float(np.median(windows))
    return float(max(abs(w - middle) for w in windows) / middle)


def window_p99(values: Sequence[float], window_len: int) -> list[float]:
    """p99 of each whole window of window_len values in a row; a rest is left out."""
    ends = range(window_len, len(values) + 1, window_len)
    return [float(np.percentile(values[end - window_len : end], 99)) for end in ends]


def chance_swing(values: Sequence[float], window_len: int, seed: int = 0, repeats: int = 200) -> float | None:
    """Median swing of the same values in random order: what windows of this length show when nothing changes."""
    rng, data = np.random.default_rng(seed), np.asarray(values, float)
    swings = [window_swing(window_p99(rng.permutation(data).tolist(), window_len)) for _ in range(repeats)]
    found = [s for s in swings if s is not None]
    return float(np.median(found)) if found else None
