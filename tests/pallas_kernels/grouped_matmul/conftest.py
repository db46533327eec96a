"""Every test of these kernels runs with a race detector, whose verdict is read afterwards."""

import pytest


@pytest.fixture(autouse=True)
def verdict(no_races: None) -> None:
    pass
