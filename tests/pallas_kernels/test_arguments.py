"""Numbers of a command line: bounds hold, what is refused is named."""

import argparse

import pytest

from pallas_kernels.arguments import seconds_between, whole_number_to


def test_bounds_are_inclusive() -> None:
    assert [seconds_between(30)(text) for text in ("30", "1e3", "86400")] == [30, 1000, 86400]
    assert [whole_number_to(64)(text) for text in ("1", "64")] == [1, 64]


@pytest.mark.parametrize("text", ["29.9", "86401", "nan", "inf", "-1", "soon", ""])
def test_seconds_out_of_bounds_are_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="seconds from 30 to 86400"):
        seconds_between(30)(text)


@pytest.mark.parametrize("text", ["0", "65", "-1", "1.5", "many", ""])
def test_numbers_out_of_bounds_are_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a number from 1 to 64"):
        whole_number_to(64)(text)
