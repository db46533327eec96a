"""What kind of device a host computes on, and that all hosts have the same one.

Where copies share the rows of all devices, every host decides for all of them, and divides in float32 (`experts/sharing.py`):
programs compiled for other chips or other instruction sets may round otherwise, and a row that two devices see elsewhere is
lost.
"""

import platform
import zlib
from pathlib import Path
from typing import Protocol

import jax

from runtime.errors import ModelLoadError

CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("flags", "Features")  # as x86 and Arm call the line


class AskingHosts(Protocol):
    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all hosts say."""
        ...


def device_kind() -> str:
    """Of this host's devices, as JAX names them; a CPU by its architecture and features, as XLA compiles for these."""
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    if jax.local_devices()[0].platform != "cpu":
        return ", ".join(kinds)
    return f"cpu {platform.machine()} with features {zlib.crc32(_cpu_features().encode()):08x}"


def check_same_devices(kind: str, hosts: AskingHosts) -> None:
    """Raises ModelLoadError, on all hosts, where they have devices of different kinds."""
    own = zlib.crc32(kind.encode())
    if hosts.smallest(own) != -hosts.smallest(-own):
        raise ModelLoadError(
            f"parallel.hosts: the hosts have devices of different kinds, which may round differently; this one has {kind}",
            param="parallel.hosts",
        )


def _cpu_features() -> str:
    """The first core's, in alphabetical order; empty where the system does not say."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in FEATURES:
            return " ".join(sorted(words.split()))
    return ""
