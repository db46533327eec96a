"""Rows a second by rung: what is worth going up to, what is left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.adaptive.efficiency import better_below, efficiency, is_worth, most_efficient

RUNGS = (1, 2, 4, 8, 16, 24, 32)
CLIFF = {8: 0.004, 16: 0.002, 32: 0.006}  # 2,000, 8,000 and 5,333 rows a second


def test_between_measured_rungs_the_step_time_is_linear_and_outside_it_is_unknown():
    assert efficiency(CLIFF, 16) == 8000
    assert efficiency(CLIFF, 24) == 24 / 0.004
    assert efficiency(CLIFF, 4) is efficiency(CLIFF, 48) is efficiency({}, 8) is None
    assert efficiency({8: 0.0, 16: float("nan"), 32: -1.0}, 16) is None


def test_the_best_is_the_smallest_of_equals():
    assert most_efficient(CLIFF, RUNGS, 32) == (16, 8000)
    assert most_efficient({8: 0.001, 16: 0.002}, RUNGS, 16) == (8, 8000)
    assert most_efficient({}, RUNGS, 16) is None


@pytest.mark.parametrize(
    ("measured", "size", "rung", "expected"),
    [
        (CLIFF, 16, 32, False),
        (CLIFF, 16, 24, False),  # 6,000 by the line between
        (CLIFF, 8, 16, True),
        ({16: 0.002}, 16, 24, True),  # never tried
        ({8: 0.001, 16: 0.008}, 8, 32, False),  # the largest that was tried was bad
        ({8: 0.001, 16: 0.0021}, 8, 16, True),  # 95 %: measurements are rough
        ({}, 8, 16, True),
    ],
)
def test_what_is_worth_a_try(measured, size, rung, expected):
    assert is_worth(measured, RUNGS, size, rung) is expected


def test_what_is_left_and_never_by_more_than_a_half():
    assert better_below(CLIFF, RUNGS, 32) == 16
    assert better_below(CLIFF, RUNGS, 16) is None
    assert better_below({4: 0.0001, 32: 0.006}, RUNGS, 32) == 16
    assert better_below({16: 0.002, 32: 0.005}, RUNGS, 32) is None  # 80 %: not clear enough
    assert better_below({}, RUNGS, 32) is None


@given(st.dictionaries(st.sampled_from(RUNGS), st.floats(1e-6, 1), max_size=7), st.sampled_from(RUNGS))
def test_what_was_just_left_is_not_worth_going_up_to(measured, size):
    lower = better_below(measured, RUNGS, size)
    if lower is not None:
        assert size / 2 <= lower < size
        best = most_efficient(measured, RUNGS, size)
        if best is not None and best[0] <= lower:
            assert not is_worth(measured, RUNGS, lower, size)
