"""Strict defaults for every test: eight CPU devices, no silent broadcasting over ranks. Set before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
