"""The interpreter's memory and races are one global object: every test begins and ends without them."""

from collections.abc import Iterator

import pytest

from pallas_kernels.interpret import races_found, reset_interpreter


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    reset_interpreter()
    yield
    reset_interpreter()


@pytest.fixture
def no_races(clean_interpreter: None) -> Iterator[None]:
    """For modules all of whose tests must end without a race, even those that never ask."""
    yield
    assert not races_found()
