"""ExpertForecast: the rows of a window's steps in, the loads of the next one out. Owned by the engine's thread.

Learning from a window that ends is cut into slices, so that it never holds up a launch for long. Imports no JAX.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from runtime.engine.expert_status import ForecastStatus
from runtime.engine.traffic_mix import Mixes
from runtime.experts.load_predictor import LoadPredictor
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.shares import imbalance

SMOOTHING = 0.2  # weight of the newest step's rows


def hour_of_day() -> float:
    """Of the local clock, in [0, 24)."""
    now = time.localtime()
    return now.tm_hour + now.tm_min / 60


class ExpertForecast:
    """What the balancing knows of traffic.

    loads, uncertainty: float64 [L, E], rows of each expert in a step, forecast, and standard errors; imbalance: of the last
    window's rows; status: who made the forecast. All None before the first window has ended. window: int64 [L, E], tokens of
    the last one. rows: int64 [L, D], of each device since the start. row_s: seconds that a row of the busiest device costs.
    """

    def __init__(
        self, placement: ExpertPlacement, hour: Callable[[], float], end_mix: Callable[[], Mixes]
    ) -> None:
        """end_mix: called once for each window with tokens; tokens by traffic key of this one and of the next."""
        self._hour, self._end_mix = hour, end_mix
        self._predictor = LoadPredictor(placement.num_layers, placement.num_experts)
        self.window = np.zeros((placement.num_layers, placement.num_experts), np.int64)
        self._tokens = self.window.copy()  # of the window that goes on
        self._num_steps = 0
        self._began_hour = 0.0  # of that window
        self._window_rows = np.zeros((placement.num_layers, placement.num_devices), np.int64)
        self.rows = self._window_rows.copy()
        self.loads: np.ndarray | None = None
        self.uncertainty: np.ndarray | None = None
        self.imbalance: float | None = None
        self.status: ForecastStatus | None = None
        self.row_s = PlanConfig().row_s

    def on_step(
        self, expert_tokens: np.ndarray, device_rows: np.ndarray, num_steps: int, step_s: float
    ) -> None:
        """A launch was read: tokens [L, E] and rows [L, D] of all its steps, seconds of one."""
        if self._num_steps == 0:
            self._began_hour = self._hour()
        self._tokens += expert_tokens
        self._window_rows += device_rows
        self.rows += device_rows
        self._num_steps += num_steps
        busiest = float(device_rows.max(axis=1).sum()) / max(1, num_steps)
        if busiest > 0:  # what one row of the busiest device costs, if a step were nothing else
            self.row_s += SMOOTHING * (min(1.0, max(1e-9, step_s / busiest)) - self.row_s)

    @property
    def has_window(self) -> bool:
        """Whether there is something to learn from."""
        return self._num_steps > 0 and bool(self._tokens.any())

    def learn(self) -> Iterator[bool]:
        """End the window, in slices: a turn may end at each yield, which is True as there is more."""
        self.imbalance = float(imbalance(self._window_rows.astype(np.float64)).mean())
        self.window, num_steps, began_hour = self._tokens.copy(), self._num_steps, self._began_hour
        self._tokens[:], self._window_rows[:], self._num_steps = 0, 0, 0
        seen, coming = self._end_mix()
        yield True  # the mix looks at each sequence that runs or waits
        has_experts = self.window.any(axis=1, keepdims=True)
        for _ in self._predictor.observing(np.where(has_experts, self.window, 1), seen, began_hour):
            yield True
        yield True
        forecast = self._predictor.predict(coming, self._hour())
        total = sum((coming or {}).values())
        self.status = ForecastStatus(
            forecast.source.value,
            {source.value: error for source, error in forecast.errors.items()},
            {key: part / total for key, part in (coming or {}).items()},
        )
        a_step = self.window.sum(axis=1, keepdims=True) / num_steps
        self.loads, self.uncertainty = forecast.loads * a_step, forecast.uncertainty * a_step
