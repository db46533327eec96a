"""Strict defaults for every test: eight CPU devices, no silent broadcasting over ranks. Set before JAX is imported.

Nothing here, and no test, fails because the machine is slow: see tests/patience.py.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    # A device that another process keeps waiting is not lost; after 40 s, the default, XLA ends the process.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_late_yet() -> None:
    """An engine counts late compiles for the whole process, in which the next module compiles what it likes."""
    if (late_compiles := sys.modules.get("runtime.ladder.late_compiles")) is not None:
        late_compiles.monitor.disarm()
