"""The engine's forecast: scored as it was made for the window to come, and learned in slices that lose no step."""

import numpy as np

from runtime.engine.expert_forecast import ExpertForecast
from runtime.engine.traffic_mix import Mixes
from runtime.experts.placement import ExpertPlacement
from tests.runtime.engine.expert_engine import EXPERTS, LAYERS, TOKENS

ROWS = np.ones((LAYERS, 4), np.int64)
OTHER = TOKENS[:, ::-1].copy()


class Forecast(ExpertForecast):
    """One step a window."""

    def __init__(self) -> None:
        self.mixes: Mixes = (None, None)
        self.hour = 0.0
        placement = ExpertPlacement.uniform(LAYERS, EXPERTS, 4, 5)
        super().__init__(placement, lambda: self.hour, lambda: self.mixes)

    def see(self, tokens: np.ndarray, seen: str, coming: str) -> None:
        self.mixes = {seen: 100.0}, {coming: 100.0}
        self.on_step(tokens, ROWS, 1, 0.1)
        list(self.learn())


def test_a_mix_that_is_foreseen_and_does_not_come_is_used_no_longer():
    """The line shows one kind of text for ever and the other one runs, though both are known well."""
    forecast = Forecast()
    for turn in range(12):
        now, coming = ("b", "a") if turn % 2 else ("a", "b")
        forecast.see(OTHER if turn % 2 else TOKENS, now, coming)
    assert forecast.status is not None
    assert forecast.status.source == "mix"
    for _ in range(6):
        forecast.see(TOKENS, "a", "b")
    assert forecast.status.source != "mix"
    assert forecast.status.errors["mix"] > 0.2
    assert forecast.loads is not None
    np.testing.assert_allclose(forecast.loads, TOKENS, rtol=0.1)


def test_steps_that_are_read_while_a_window_is_learned_from_are_of_the_next():
    forecast = Forecast()
    keys = {str(number): 1.0 for number in range(20)}
    for _ in range(2):
        forecast.mixes = keys, keys
        forecast.on_step(TOKENS, ROWS, 1, 0.1)
        num_slices = 0
        for _ in forecast.learn():
            forecast.on_step(OTHER, ROWS, 1, 0.1)
            num_slices += 1
    assert num_slices == 5  # the mix, three slices of keys, what is left; then the forecast
    np.testing.assert_array_equal(forecast.window, TOKENS + 2 * OTHER)  # the first window had two slices
    assert forecast._num_steps == num_slices


def test_a_window_is_of_the_hour_that_it_began_in():
    forecast = Forecast()
    forecast.hour = 8.9
    forecast.on_step(TOKENS, ROWS, 1, 0.1)
    forecast.hour = 9.0
    forecast.on_step(TOKENS, ROWS, 1, 0.1)
    list(forecast.learn())
    assert set(forecast._predictor._hours) == {8}
