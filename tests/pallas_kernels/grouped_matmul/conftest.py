"""Every test of these kernels runs with a race detector, whose verdict is read afterwards."""

from collections.abc import Iterator

import pytest

from pallas_kernels.interpret import races_found, reset_interpreter


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    reset_interpreter()
    yield
    raced = races_found()
    reset_interpreter()
    assert not raced
