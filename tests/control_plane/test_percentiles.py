"""Quantiles of histograms: as Prometheus interpolates them, one or many at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from control_plane.percentiles import percentile, percentiles


def plainly(bounds: list[float], counts: list[int], quantile: float) -> float | None:
    """Bucket by bucket, as the text of histogram_quantile has it."""
    if not sum(counts):
        return None
    rank, seen, low = quantile * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return low + (bound - low) * (rank - seen) / count
        seen, low = seen + count, bound
    return bounds[-1]


def test_it_is_interpolated_as_prometheus_does() -> None:
    assert percentile((1.0, 2.0, 4.0), [0, 10, 0, 0], 0.5) == 1.5
    assert percentile((1.0, 2.0, 4.0), [10, 0, 10, 0], 0.75) == 3.0
    assert percentile((1.0, 2.0, 4.0), [0, 0, 0, 5], 0.99) == 4.0
    assert percentile((1.0, 2.0), [0, 0, 0], 0.99) is None


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1), st.floats(0.01, 1.0))
def test_many_at_once_are_each_alone(counts: list[list[int]], quantile: float) -> None:
    bounds = [0.5, 1.0, 8.0]
    found = percentiles(bounds, np.array(counts), quantile)
    for value, row in zip(found, counts, strict=True):
        expected = plainly(bounds, row, quantile)
        assert (expected is None) == bool(np.isnan(value))
        assert expected is None or abs(value - expected) < 1e-9
