"""The native kernels in this process: whether they can run here, and their names in XLA.

Decided once, at the first question, and then remembered. `unavailable()` may compile for some seconds; a server asks before it
serves, so that no step waits for it.
"""

import ctypes
import functools
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.native.compile import (
    COMPILERS,
    CompileError,
    default_folder,
    find_compiler,
    shared_object,
)

OPS = ("expert_mlp", "linear")
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
CPU_INFO = Path("/proc/cpuinfo")
PANEL, MAX_LOOSE_ROWS = 16, 12  # as in gemm.h

_lock = threading.Lock()


def unavailable() -> str | None:
    """None where the kernels are compiled, loaded and registered, else the sentence that says why not."""
    with _lock:
        return _loaded().why_not


def target(op: str) -> str:
    """The name under which XLA knows an op. It holds the digest of the source, and so does every compiled program.

    A program in the persistent cache can therefore never call a kernel other than the one it was compiled for.
    """
    with _lock:
        loaded = _loaded()
    if loaded.why_not is not None:
        raise NotImplementedError(f"native: {loaded.why_not}")
    return f"moe_ladder_{op}_{loaded.digest}"


def unfit_for_native(*operands: jax.Array | jax.ShapeDtypeStruct) -> dict[str, str]:
    """{"native": why these operands are not for the kernels}, empty where they are."""
    others = sorted({str(a.dtype) for a in operands if a.dtype != jnp.bfloat16})
    return {"native": f"takes bfloat16, got {', '.join(others)}"} if others else {}


def max_panel_rows(num_rows: int) -> int:
    """Rows that the packed buffers may need, as in expert_mlp.h: thirteen rows may take a panel of sixteen."""
    return (num_rows * PANEL + MAX_LOOSE_ROWS) // (MAX_LOOSE_ROWS + 1)


def scratch_shape(num_elements: int) -> jax.ShapeDtypeStruct:
    """A buffer of so many bfloat16 values at an address that is a multiple of 64."""
    return jax.ShapeDtypeStruct((2 * num_elements + 64,), jnp.uint8)


@dataclass(frozen=True)
class Loaded:
    """The library in this process: its digest, or why there is none."""

    why_not: str | None = None
    digest: str = ""


def load(cpu_info: Path = CPU_INFO, find_compiler: Callable[[], str | None] = find_compiler) -> Loaded:
    """Compile if need be, load, and register every op with XLA. Any failure becomes the reason in the result."""
    why_not = machine_lacks(cpu_info) or device_is_not_cpu()
    if why_not is not None:
        return Loaded(why_not)
    compiler = find_compiler()
    if compiler is None:
        return Loaded(f"no C++ compiler, looked for {', '.join(COMPILERS)}")
    try:
        path = shared_object(default_folder(), compiler)
        library = ctypes.CDLL(str(path))
    except CompileError as error:
        return Loaded(str(error))
    except OSError as error:
        return Loaded(f"the compiled kernels cannot be loaded: {str(error)[:300]}")
    digest = path.stem.removeprefix("kernels-")
    for op in OPS:
        handler = jax.ffi.pycapsule(getattr(library, f"moe_ladder_{op}"))
        jax.ffi.register_ffi_target(f"moe_ladder_{op}_{digest}", handler, platform="cpu")
    return Loaded(digest=digest)


_loaded = functools.cache(load)


def machine_lacks(cpu_info: Path) -> str | None:
    """What the processor lacks, from the flags that the kernel lists."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"needs Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"the processor's flags cannot be read: {error.strerror}"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    missing = [flag for flag in CPU_FLAGS if flag not in flags]
    return f"the processor lacks {', '.join(missing)}" if missing else None


def device_is_not_cpu() -> str | None:
    device = jax.devices()[0]
    return None if device.platform == "cpu" else f"needs a CPU, the default device is {device.platform}"
