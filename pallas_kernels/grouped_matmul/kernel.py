"""The Mosaic GPU kernel for Hopper: TMA brings both operands, wgmma multiplies, one tile belongs to one expert.

Every group starts at a whole tile, so a tile has one expert and a plain TMA store is right: no masks. TMA with the swizzle
that wgmma wants takes rows from multiples of 8 only, so reading the sorted rows in place is not possible.

A pipeline's slot is filled again one step after its product was issued (`delay_release=1`), so each step waits for the
product before it. The interpreter multiplies at once and would not notice a missing wait; the ahead-of-time tool does.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.reference import GATES
from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.interpret import InterpretParams


@functools.partial(jax.jit, static_argnames=("tile", "gate", "interpret"))  # one compilation for all layers
def grouped_matmul_tiles(
    x: Float[Array, "R K"],
    w: Float[Array, "E O K"],
    num_live: Int[Array, " 1"],
    expert: Int[Array, " M"],
    *,
    tile: TileConfig,
    gate: str | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "R P"]:
    """Rows [t * tile.rows, (t + 1) * tile.rows) of x and of the result are tile t, and meet w[expert[t]]; R = M * rows.

    gate: None, or a name of GATES: then w holds gates over ups, P = O / 2, and the result is gate(x @ g.T, x @ u.T).
    Rows of dead tiles stay unwritten.
    """
    is_gated = gate is not None
    (num_rows, k), outputs = x.shape, w.shape[1] // (2 if is_gated else 1)
    tile.check(k, outputs, is_gated=is_gated)
    up_block = outputs // tile.outputs  # the halves of w are this many tiles apart
    accumulator = plgpu.ACC(  # pyright: ignore[reportPrivateImportUsage]
        (tile.outputs, tile.rows) if tile.swap else (tile.rows, tile.outputs)
    )
    num_steps = k // tile.depth
    delay = 1 if num_steps > 1 else 0  # products that may be on their way when the next step begins

    def multiply(acc, x_tile, w_tile):
        if tile.swap:
            plgpu.wgmma(acc, w_tile, x_tile.T)
        else:
            plgpu.wgmma(acc, x_tile, w_tile.T)

    def body(
        num_live_ref,  # [1]
        expert_ref,  # [M]
        x_ref,  # [R, K]
        w_ref,  # [E, O, K]
        out_ref,  # [R, P]
    ):
        t, j = lax.axis_index("tile"), lax.axis_index("outputs")

        @pl.when(t < num_live_ref[0])
        def _():
            w_expert = w_ref.at[expert_ref[t]]
            x_spec = plgpu.BlockSpec((tile.rows, tile.depth), lambda i: (t, i), delay_release=delay)

            def w_spec(block):
                return plgpu.BlockSpec((tile.outputs, tile.depth), lambda i: (block, i), delay_release=delay)

            def pipeline(step, blocks, operands):
                plgpu.emit_pipeline(
                    step,
                    grid=(num_steps,),
                    max_concurrent_steps=min(tile.steps, num_steps),
                    in_specs=[x_spec, *(w_spec(block) for block in blocks)],
                )(x_ref, *operands)

            def plain(acc):
                def step(_, x_tile, w_tile):
                    multiply(acc, x_tile, w_tile)
                    plgpu.wgmma_wait(delay)  # the step before has read its tiles: they are overwritten next

                pipeline(step, [j], [w_expert])
                return acc[...]

            def gated(acc_gate, acc_up):
                def step(_, x_tile, gate_tile, up_tile):
                    multiply(acc_gate, x_tile, gate_tile)
                    multiply(acc_up, x_tile, up_tile)
                    plgpu.wgmma_wait(2 * delay)  # two products a step

                pipeline(step, [j, j + up_block], [w_expert, w_expert])
                return acc_gate[...], acc_up[...]

            if gate is None:
                result = pl.run_scoped(plain, accumulator)
            else:
                result = GATES[gate](*pl.run_scoped(gated, accumulator, accumulator))
            store_tile(result, out_ref, t, j, is_swapped=tile.swap)

    call: Callable[..., Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, outputs), x.dtype),
        grid=(outputs // tile.outputs, num_rows // tile.rows),
        grid_names=("outputs", "tile"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
    )
    return call(num_live, expert, x, w)


def store_tile(result, out_ref, t, j, *, is_swapped: bool) -> None:
    """The tile by TMA to its place in the aligned result: rows t, outputs j; swapped it comes as [outputs, rows]."""
    rows, outputs = reversed(result.shape) if is_swapped else result.shape

    @functools.partial(pl.run_scoped, out=plgpu.SMEM((rows, outputs), out_ref.dtype))
    def _(out):
        rounded = result.astype(out_ref.dtype)
        if is_swapped:
            out.T[...] = rounded
        else:
            out[...] = rounded
        plgpu.commit_smem()
        place = out_ref.at[pl.ds(t * rows, rows), pl.ds(j * outputs, outputs)]
        plgpu.copy_smem_to_gmem(out, place)
        plgpu.wait_smem_to_gmem(0)
