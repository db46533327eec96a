"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui.units import DASH, age, clock, count, money, num_bytes, percent, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (0.000123, "0.123 ms"), (0.0301, "30.1 ms"), (1.317, "1.32 s"), (150, "2.5 min"), (9000, "2.5 h"),
     (None, DASH), (math.nan, DASH)],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "100 %"), (0.99999, "> 99.9 %"), (0.00001, "< 0.1 %"), (0.0, "0 %"), (0.973, "97.3 %"), (None, DASH)],
)  # fmt: skip
def test_a_share_that_is_not_all_is_not_shown_as_all(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_others() -> None:
    assert [num_bytes(v) for v in (812, 1.5 * 2**20, 2**60)] == ["812 B", "1.5 MiB", "1,024 PiB"]
    assert [count(v) for v in (0, 812, 15_300, 21_000_000)] == ["0", "812", "15.3 k", "21 M"]
    assert [money(v) for v in (0.0123, 12.5, None)] == ["0.012 USD", "12.50 USD", DASH]
    assert [age(v) for v in (-3, 40, 240, 7200, 3 * 86_400, None)] == [
        "0 s",
        "40 s",
        "4 min",
        "2 h",
        "3 d",
        DASH,
    ]
    assert clock(1e30) == DASH


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_every_number_has_a_short_text(value: float | None) -> None:
    for write in (seconds, num_bytes, count, percent, money, age, clock):
        assert 0 < len(write(value)) < 450
