"""The XLA flags that this server wants, in one place. Must run before JAX makes its first array. Imports no JAX.

A flag that the environment sets already stays as it is: the operator's word counts.
"""

import os
import re

VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
DOT_MERGER = "--xla_gpu_dot_merger_threshold_mb"
OF_A_HOST = (VIRTUAL_DEVICES, "--xla_dump_")

WANTED = {
    # Full vectors on CPUs that have AVX-512: 15 % less processor time in products of few rows (docs/moe_on_cpu.md).
    "--xla_cpu_prefer_vector_width": "512",
    # Products of two micro-batches share their weight; XLA would merge them, and both would wait for each other's
    # exchange (docs/expert_parallel.md).
    DOT_MERGER: "0",
}


def set_xla_flags() -> None:
    """Add what is missing to XLA_FLAGS."""
    present = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in WANTED.items() if name not in present]
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([present, *missing]).strip()


def settle_flags(micro_batch_overlap: str) -> None:
    """`set_xla_flags`, and what parallel.micro_batch_overlap needs of them. Raises ValueError as `check_overlap_flags`."""
    set_xla_flags()
    if micro_batch_overlap != "off":
        check_overlap_flags()


def use_virtual_devices(num_devices: int) -> None:
    """Make so many devices of this machine's CPU, for measurements and tests; the last such flag counts."""
    present = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{present} {VIRTUAL_DEVICES}={num_devices}".strip()


def shared_flags() -> dict[str, str]:
    """Flags by name that all hosts of an engine must have alike: all but the number of devices and what is dumped where."""
    pairs = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in pairs if not name.startswith(OF_A_HOST)}


def check_overlap_flags() -> None:
    """Raises ValueError, with flag and value, where micro-batches could not overlap."""
    found = re.search(rf"{DOT_MERGER}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if found is None or found[1] != "0":
        value = found[1] if found else "not set"
        raise ValueError(
            f"XLA_FLAGS: {DOT_MERGER} is {value}; parallel.micro_batch_overlap needs 0, or the products of both "
            "micro-batches are merged and wait for both exchanges"
        )
