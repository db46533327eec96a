"""Cases and steps with one fault each, for `python -m pallas_kernels.aot --cases tests.pallas_kernels.planted_aot`."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot_cases import AotCase, AotStep
from pallas_kernels.expert_mlp.op import expert_mlp
from pallas_kernels.grouped_matmul.cases import PRODUCTS, aot_case
from pallas_kernels.grouped_matmul.tiles import TileConfig


def copied(x: jax.Array) -> Any:
    """Moves data and multiplies nothing."""

    def body(x_ref, out_ref, tile, barrier):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * 64, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(i * 64, 64)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((64,), x.dtype), plgpu.Barrier()],
    )(x)


def dies(x: jax.Array) -> jax.Array:
    os._exit(3)


def hangs(x: jax.Array) -> jax.Array:
    while True:
        pass


def raises(x: jax.Array) -> jax.Array:
    raise ValueError("on purpose")


VECTOR = (jax.ShapeDtypeStruct((256,), jnp.float32),)
LARGE_TILE = aot_case(
    PRODUCTS[7], TileConfig(256, 256, 64, 2)
)  # 512 accumulators a thread, which has 255 registers
AOT_CASES = (
    AotCase("planted/spill", LARGE_TILE.function, LARGE_TILE.args),
    AotCase("planted/no wgmma", copied, VECTOR),
    AotCase("planted/dies", dies, VECTOR),
    AotCase("planted/hangs", hangs, VECTOR),
    AotCase("planted/raises", raises, VECTOR),
)

TOKENS, EXPERTS, D, F = 640, 32, 512, 256  # no argument has the shape of a dense product


def both_ways(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, sizes: jax.Array) -> jax.Array:
    """The kernel and, by mistake, a product of every token with every expert."""
    return expert_mlp(x, w_gate_up, w_down, sizes) + expert_mlp(
        x, w_gate_up, w_down, sizes, backend="reference"
    )


def build_dense(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    shapes = ((TOKENS, D), (EXPERTS, 2 * F, D), (EXPERTS, D, F))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return both_ways, (*arrays, jax.ShapeDtypeStruct((EXPERTS,), jnp.int32))


def build_exposed(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """One batch on two GPUs: there is nothing to compute while its rows travel."""
    here, everywhere = PartitionSpec("devices"), PartitionSpec()

    def exchange(x):
        return lax.all_to_all(x.reshape(2, -1, D), "devices", 0, 0).reshape(x.shape)

    def step(x, *weights):
        return exchange(expert_mlp(exchange(x), *weights))

    shapes = ((TOKENS, D), (EXPERTS, 2 * F, D), (EXPERTS, D, F))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (here, everywhere, everywhere), strict=True)
    ]
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32, sharding=NamedSharding(mesh, everywhere))
    specs = (here, everywhere, everywhere, everywhere)
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=here, check_vma=False), (*arrays, sizes)


planted = partial(AotStep, max_temp_bytes=1 << 30, dense_elements=TOKENS * EXPERTS * D)
AOT_STEPS = (
    planted("planted/dense", build_dense),
    planted("planted/exposed", build_exposed, devices=2, max_exposed_collectives=0),
)
