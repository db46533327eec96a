"""The XLA flags that this server wants, in one place. Must run before JAX makes its first array. Imports no JAX.

A flag that the environment sets already stays as it is: the operator's word counts.
"""

import os

# Full vectors on CPUs that have AVX-512: 15 % less processor time in products of few rows (docs/moe_on_cpu.md).
WANTED = {"--xla_cpu_prefer_vector_width": "512"}


def set_xla_flags() -> None:
    """Add what is missing to XLA_FLAGS."""
    present = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in WANTED.items() if name not in present]
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([present, *missing]).strip()
