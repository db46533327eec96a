"""Pace: how many layers of a long work are done between two launches. Imports no JAX."""

import time
from collections import deque
from collections.abc import Callable

SLICE_S = 1.5e-3  # what a turn may spend on it; a slice of one layer may take longer
LONGEST_SLICE_S = 5e-3  # beside long launches: tokens that were read wait for it
LAUNCH_PART = 0.1  # of a launch; the devices have the next one by then, so they do not wait
ROOMY = 2 / 3  # of a slice


class Pace:
    """As many layers as took a slice of late, judged by the slower of the last two slices: works may have two kinds.

    Grows twofold at most, as few layers say little of many.
    """

    def __init__(self, timer: Callable[[], float] = time.perf_counter, slice_s: float = SLICE_S) -> None:
        self._timer, self._slice_s = timer, slice_s
        self._fitting = deque([1], maxlen=2)

    def fit(self, launch_s: float) -> None:
        """Launches take so long now: slices may be a tenth of one, within bounds."""
        self._slice_s = min(max(SLICE_S, LAUNCH_PART * launch_s), LONGEST_SLICE_S)

    @property
    def num_layers(self) -> int:
        """Of the next slice, at least one."""
        return min(self._fitting)

    def do(self, work: Callable[[int], object], num_left: int) -> int:
        """A slice of what is left: work(number of layers). Returns that number."""
        num_layers, start = min(self.num_layers, num_left), self._timer()
        work(num_layers)
        spent = max(1e-9, self._timer() - start)
        if num_layers < self.num_layers and spent < self._slice_s:
            return num_layers  # the last ones left say nothing of how many would have fitted
        fitting = int(num_layers * self._slice_s / spent)
        # The call itself costs something: one more layer is tried even where none more would fit in proportion.
        least = num_layers + 1 if spent < ROOMY * self._slice_s else 1
        self._fitting.append(max(least, min(fitting, 2 * num_layers)))
        return num_layers
