"""Efficiency: rows a second of a decode rung, as measured. Imports no JAX.

More rows make a step slower; past some rung it slows down by more than the rows it adds, and both throughput and
latency lose. Where that is differs by machine and model (caches, forms of the product), so it is measured.
"""

from collections.abc import Mapping

# A larger rung must give this share of the best smaller one's rows a second: measurements are rough.
GAIN = 0.9
# One that gives less than this share is left; the gap keeps noise from moving it to and fro.
LOSS = 0.75


def efficiency(step_s_by_rows: Mapping[int, float], rows: int) -> float | None:
    """Rows a second at `rows`; between measured rungs the step time is taken as linear; None outside of them."""
    measured = sorted((r, t) for r, t in step_s_by_rows.items() if t > 0)
    below = [(r, t) for r, t in measured if r <= rows]
    above = [(r, t) for r, t in measured if r >= rows]
    if not below or not above:
        return None
    (r0, t0), (r1, t1) = below[-1], above[0]
    step_s = t0 if r1 == r0 else t0 + (t1 - t0) * (rows - r0) / (r1 - r0)
    return rows / step_s


def most_efficient(
    step_s_by_rows: Mapping[int, float], rungs: tuple[int, ...], size: int
) -> tuple[int, float] | None:
    """The rung up to `size` that computes most rows a second, the smallest of equals, and how many; None if unknown."""
    known = [(found, -r) for r in rungs if r <= size and (found := efficiency(step_s_by_rows, r)) is not None]
    if not known:
        return None
    rows_s, negative = max(known)
    return -negative, rows_s


def is_worth(step_s_by_rows: Mapping[int, float], rungs: tuple[int, ...], size: int, rung: int) -> bool:
    """Whether going up from `size` to `rung` keeps throughput.

    What lies above all measured rungs is judged by the largest of them: it is worth a try if that one was.
    """
    best = most_efficient(step_s_by_rows, rungs, size)
    largest = max((r for r, t in step_s_by_rows.items() if t > 0), default=0)
    found = efficiency(step_s_by_rows, min(rung, largest))
    return best is None or found is None or found >= GAIN * best[1]


def better_below(step_s_by_rows: Mapping[int, float], rungs: tuple[int, ...], size: int) -> int | None:
    """A smaller rung that computes clearly more rows a second than `size`, if there is one; never below half of it in one
    move, as a mistake must not cost much."""
    best, found = most_efficient(step_s_by_rows, rungs, size), efficiency(step_s_by_rows, size)
    if best is None or found is None or best[0] >= size or found >= LOSS * best[1]:
        return None
    return next((r for r in rungs if max(best[0], size / 2) <= r < size), None)
