"""Slices take about what they may, whatever a layer costs, and never more layers than are left."""

import pytest

from runtime.engine.pace import LAUNCH_PART, LONGEST_SLICE_S, SLICE_S, Pace


class Clock:
    """Moves when work is done."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def work(self, fixed_s: float, layer_s: float):
        def do(num_layers: int) -> None:
            self.now_s += fixed_s + num_layers * layer_s

        return do


@pytest.mark.parametrize(("fixed_s", "layer_s"), [(0, 1e-4), (1e-3, 1e-4), (0, 1e-2), (1.4e-3, 1e-6), (0, 0)])
def test_slices_grow_to_what_fits_and_no_further(fixed_s, layer_s):
    clock = Clock()
    pace, spent, done = Pace(lambda: clock.now_s), [], []
    for _ in range(200):
        before = clock.now_s
        done.append(pace.do(clock.work(fixed_s, layer_s), num_left=1000))
        spent.append(clock.now_s - before)
    assert max(spent) <= max(4 / 3 * SLICE_S, fixed_s + layer_s) * 1.01
    assert done[0] == 1
    if fixed_s + layer_s < SLICE_S:
        assert done[-1] == 1000 or spent[-1] > 0.6 * SLICE_S


def test_of_two_kinds_of_work_in_turns_the_slower_one_counts():
    clock = Clock()
    pace = Pace(lambda: clock.now_s)
    for turn in range(100):
        before = clock.now_s
        pace.do(clock.work(0, 3e-4 if turn % 2 else 1e-5), num_left=1000)
        assert clock.now_s - before <= 4 / 3 * SLICE_S * 1.01


def test_no_more_than_is_left():
    pace = Pace(lambda: 0.0)
    for left in (5, 5, 5, 5, 5, 2, 1):
        assert pace.do(lambda _: None, left) <= left


def test_the_few_layers_left_of_a_plan_do_not_slow_the_next():
    clock = Clock()
    pace = Pace(lambda: clock.now_s)
    for _ in range(20):
        pace.do(clock.work(0, 1e-4), num_left=1000)
    before = pace.num_layers
    assert pace.do(clock.work(0, 1e-4), num_left=2) == 2
    assert pace.num_layers == before > 4


@pytest.mark.parametrize(
    ("launch_s", "slice_s"), [(0.0, SLICE_S), (0.03, LAUNCH_PART * 0.03), (9.0, LONGEST_SLICE_S)]
)
def test_long_launches_leave_room_for_longer_slices_within_bounds(launch_s, slice_s):
    clock = Clock()
    pace = Pace(lambda: clock.now_s)
    pace.fit(launch_s)
    for _ in range(50):
        before = clock.now_s
        pace.do(clock.work(0, 1e-4), num_left=1000)
    assert 0.6 * slice_s < clock.now_s - before <= 4 / 3 * slice_s * 1.01
