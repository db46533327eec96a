"""Numbers of a command line within bounds, as `type=` of an argparse argument."""

import argparse
from collections.abc import Callable


def seconds_between(low: float, high: float = 86400) -> Callable[[str], float]:
    """A parser of seconds; what is no number, NaN included, or out of bounds is refused by name."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not low <= seconds <= high:
            raise argparse.ArgumentTypeError(f"{text[:20]!r}: seconds from {low:g} to {high:g}")
        return seconds

    return parse


def whole_number_to(high: int) -> Callable[[str], int]:
    """A parser of whole numbers from 1 on."""

    def parse(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text[:20]!r}: a number from 1 to {high}")
        return int(text)

    return parse
