"""Quantiles of histograms, as Prometheus' histogram_quantile computes them: linear within a bucket."""

from collections.abc import Sequence

import numpy as np


def percentile(bounds: Sequence[float], counts: Sequence[int], quantile: float) -> float | None:
    """The quantile of one histogram. What lies above the last bound counts as the last bound; None when it is empty.

    counts: one more than bounds, not cumulative.
    """
    (value,) = percentiles(bounds, np.asarray([counts], np.float64), quantile)
    return None if np.isnan(value) else float(value)


def percentiles(bounds: Sequence[float], counts: np.ndarray, quantile: float) -> np.ndarray:
    """The quantile of N histograms, counts [N, B + 1]; NaN where one is empty. Result [N]."""
    edges = np.asarray((0.0, *bounds, bounds[-1]), np.float64)  # above the last bound: the last bound
    cumulative = np.cumsum(counts, axis=1)
    total = cumulative[:, -1]
    rank = quantile * total
    rows = np.arange(len(counts))
    # The first bucket that is not empty and reaches the rank.
    bucket = np.argmax((cumulative >= rank[:, None]) & (counts > 0), axis=1)
    in_bucket = counts[rows, bucket]
    before = cumulative[rows, bucket] - in_bucket
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (rank - before) / in_bucket
        value = edges[bucket] + (edges[bucket + 1] - edges[bucket]) * share
    return np.where(total > 0, value, np.nan)
