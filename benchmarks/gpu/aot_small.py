"""Every named small case compiled for an H200: `python -m pallas_kernels.aot --cases benchmarks.gpu.aot_small`.

The interpreter takes sizes that the compiler refuses, such as rows that are no multiple of 8: a kernel that passes in every
test may still not compile for the shape of a rung.
"""

import jax

from benchmarks.gpu.small_cases import small_cases
from pallas_kernels.aot_cases import AotCase

_ANY_SEED = 0  # values are dropped, shapes stay

AOT_CASES: tuple[AotCase, ...] = tuple(
    AotCase(
        f"small/{case.name}",
        case.kernel(None),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.args),
        needs_wgmma=False,  # the router has none; the other ops' own cases demand it
        max_spill_bytes=32,
    )
    for case in small_cases(_ANY_SEED)
)
