"""An NVIDIA H200 described in words, so that XLA compiles for it on a machine without a GPU.

Needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt, whose compiler and PTX assembler make machine code; no CUDA toolkit,
no driver. `.ci/aot` makes an environment with them.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WHEELS = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")  # modules of the two wheels
# The figures of the device that XLA and Mosaic ask for; they pick sm_90a from the compute capability.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150750000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def missing_wheels() -> str | None:
    """Why nothing can be compiled for an H200 here, or None."""
    for module in WHEELS:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # its parent package
            found = False
        if not found:
            return f"the module {module} is not installed; `.ci/aot` makes an environment that has it"
    return None


def h200_mesh(num_devices: int = 1) -> Mesh:
    """A mesh of one host's GPUs that exist on paper."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), ("devices",))


def compile_for(mesh: Mesh, function: Callable[..., object], args: tuple[Any, ...]) -> jax.stages.Compiled:
    """All the way to machine code. function: jitted where it donates arguments. args: abstract; those without a sharding
    are replicated over the mesh.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return a if a.sharding is not None else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated)

    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*jax.tree.map(placed, args))
    return traced.lower(lowering_platforms=("cuda",)).compile()
