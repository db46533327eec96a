"""The Mosaic GPU interpreter: kernels run on the CPU with simulated memory, copies, barriers and a race detector.

The one place that names what Pallas keeps private about it. For tests and dry runs: it is thousands of times slower than a
GPU, takes one kernel at a time, and does not work under shard_map.
"""

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

InterpretParams = plgpu.InterpretGPUParams


def interpret_params(*, detect_races: bool = True) -> InterpretParams:
    """Pass as `interpret=` to a kernel."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def races_found() -> bool:
    """True if the kernels since the last reset raced. jax 0.11 only prints it (0.12 raises too), so a test has to ask."""
    try:
        races = gpu_callbacks.get_races()
    except AssertionError:  # no kernel ran since the last reset
        return False
    return bool(races is not None and races.races_found)


def reset_interpreter() -> None:
    """Forget simulated memory and races: needed after any exception, for the memory is one global object."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
