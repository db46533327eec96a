"""Lines: the points of a ring as the series of a page. Pure; arrays in, plain data out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from control_plane.console.history import GAUGES, RUNG_TOTALS, TOTALS, Point
from control_plane.percentiles import percentile, percentiles

type Series = dict[str, Any]


class Lines:
    """N + 1 points give N intervals; what cannot be said of one is NaN (null on the wire)."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self.times = np.array([p.time_s for p in points[1:]], np.float64)
        start = np.array([p.time_s for p in points[:-1]], np.float64)
        self._seconds = np.maximum(self.times - start, 1e-3) if len(points) > 1 else np.zeros(0)
        self._totals = np.array([p.totals for p in points]).reshape(len(points), len(TOTALS))

    @property
    def seconds(self) -> float:
        """From the first point to the last."""
        return float(self._seconds.sum())

    # -- over the whole span ------------------------------------------------------------------------------------

    def gained(self, name: str) -> float:
        """Growth of a total from the first point to the last."""
        column = self._totals[:, TOTALS.index(name)]
        return float(column[-1] - column[0]) if len(column) > 1 else 0.0

    def quotient(self, part: str, whole: str) -> float | None:
        total = self.gained(whole)
        return self.gained(part) / total if total > 0 else None

    def per_second(self, name: str) -> float | None:
        return self.gained(name) / self.seconds if self.seconds > 0 else None

    def percentile(self, name: str, quantile: float) -> float | None:
        counts = self.observed(name)
        return (
            None if counts is None else percentile(self._points[-1].bounds[name], counts.tolist(), quantile)
        )

    def observed(self, name: str) -> np.ndarray | None:
        """Counts of a histogram over the span; None without two points."""
        if len(self._points) < 2:
            return None
        return self._points[-1].counts[name] - self._points[0].counts[name]

    def rungs(self) -> dict[str, np.ndarray]:
        """What each rung of the newest point has gained since the first point that knew it, in RUNG_TOTALS' order."""
        if not self._points:
            return {}
        first, last = self._points[0], self._points[-1]
        before = dict(zip(first.rung_names, first.rungs, strict=True))
        nothing = np.zeros(len(RUNG_TOTALS))
        return {
            name: row - before.get(name, nothing if len(self._points) > 1 else row)
            for name, row in zip(last.rung_names, last.rungs, strict=True)
        }

    # -- series -------------------------------------------------------------------------------------------------

    def delta(self, name: str) -> np.ndarray:
        return np.diff(self._totals[:, TOTALS.index(name)])

    def rate(self, name: str, unit: str, total: str | None = None) -> Series:
        return series(name, unit, self.delta(total or name) / self._seconds)

    def total(self, name: str, unit: str = "1") -> Series:
        return series(name, unit, self._totals[1:, TOTALS.index(name)])

    def share(self, name: str, part: str, whole: str, label: str = "") -> Series:
        """One total's growth over another's; NaN where the other stood still."""
        return series(name, "share", ratio(self.delta(part), self.delta(whole)), label)

    def busy(self, name: str = "busy_share") -> Series:
        return series(name, "share", np.minimum(1.0, self.delta("busy_s") / self._seconds))

    def quantile(self, name: str, histogram: str, quantile: float) -> Series:
        if not len(self.times):
            return series(name, "s", self.times)
        counts = np.diff(np.array([p.counts[histogram] for p in self._points]), axis=0)
        return series(name, "s", percentiles(self._points[-1].bounds[histogram], counts, quantile))

    def gauge(self, name: str, unit: str) -> Series:
        i = GAUGES.index(name)
        later = self._points[1:]
        return series(
            name,
            unit,
            np.array([p.sums[i] / p.num for p in later]),
            low=np.array([p.low[i] for p in later]),
            high=np.array([p.high[i] for p in later]),
        )

    def rung_hits(self, names: Sequence[str]) -> list[Series]:
        """Launches a second of each rung; NaN while it was not in the ladder."""
        columns = {name: np.full(len(self._points), np.nan) for name in names}
        for row, point in enumerate(self._points):
            for name, totals in zip(point.rung_names, point.rungs, strict=True):
                if name in columns:
                    columns[name][row] = totals[0]
        return [
            series("rung_hits", "1/s", np.diff(column) / self._seconds, name)
            for name, column in columns.items()
        ]


def series(
    name: str,
    unit: str,
    values: np.ndarray,
    label: str = "",
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> Series:
    """As on the wire (console_schemas.Series); seven digits are enough for a plot."""
    found: Series = {"name": name, "unit": unit, "label": label, "values": values.astype(np.float32)}
    if low is not None and high is not None:
        found |= {"low": low.astype(np.float32), "high": high.astype(np.float32)}
    return found


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
