"""The interpreter notices the usual bugs of a kernel; the tests of all kernels rely on that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpret_params, races_found


def doubled(bug: str) -> jax.Array:
    """Four blocks, each doubles its 64 values."""

    def body(x_ref, out_ref, x_tile, out_tile, barrier):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * 64, 64)], x_tile, barrier)
        if bug != "no wait for the copy":
            plgpu.barrier_wait(barrier)
        out_tile[...] = x_tile[...] * 2
        if bug != "no commit":
            plgpu.commit_smem()
        to = 0 if bug == "two writers" else i
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[pl.ds(to * 64, 64)])
        if bug != "no wait for the store":
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((256,), jnp.float32),
        grid=(4,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((64,), jnp.float32), plgpu.SMEM((64,), jnp.float32), plgpu.Barrier()],
        interpret=interpret_params(),
    )
    return jax.block_until_ready(kernel(jnp.arange(256, dtype=jnp.float32)))


def test_a_right_kernel_is_right() -> None:
    np.testing.assert_array_equal(doubled("none"), np.arange(256) * 2.0)
    assert not races_found()


@pytest.mark.parametrize("bug", ["no wait for the copy", "no commit", "no wait for the store", "two writers"])
def test_a_planted_bug_is_caught(bug: str) -> None:
    try:
        doubled(bug)
    except Exception:  # jax 0.12 raises where 0.11 only counts; the kind of exception differs by bug
        return
    assert races_found()
