"""Strict defaults for every test: eight CPU devices, no silent broadcasting over ranks. Set before JAX is imported."""

import os
import sys

import pytest

os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_late_yet() -> None:
    """An engine counts late compiles for the whole process, in which the next module compiles what it likes."""
    if (late_compiles := sys.modules.get("runtime.ladder.late_compiles")) is not None:
        late_compiles.monitor.disarm()
