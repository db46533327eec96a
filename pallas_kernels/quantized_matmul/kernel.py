"""The Mosaic GPU kernels for Hopper; tiles and their map are those of `grouped_matmul`: one tile belongs to one expert.

Blocks: both operands are e4m3 and wgmma multiplies them natively. Its own sums are too short to run over the whole
contraction, so each step of 128 gives a partial product that is scaled and added in float32.

Outputs: the weights become bfloat16 in registers, where wgmma takes its left operand from; the scale of an output waits for
the end. The interpreter takes no operand from registers, so there they go through shared memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.kernel import store_tile
from pallas_kernels.grouped_matmul.reference import GATES
from pallas_kernels.interpret import InterpretParams
from pallas_kernels.quantized_matmul.quantise import BLOCK, QuantizedRows, QuantizedWeights
from pallas_kernels.quantized_matmul.tiles import DEPTH, QuantizedTile

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@functools.partial(jax.jit, static_argnames=("tile", "gate", "interpret"))  # one compilation for all layers
def block_scaled_matmul_tiles(
    x: QuantizedRows,
    w: QuantizedWeights,
    num_live: Int[Array, " 1"],
    expert: Int[Array, " M"],
    *,
    tile: QuantizedTile,
    gate: str | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "R P"]:
    """Rows [t * tile.rows, (t + 1) * tile.rows) meet w[expert[t]]; bfloat16. Rows of dead tiles stay unwritten."""
    (num_rows, k), outputs, parts = _sizes(x.values, w, gate)
    tile.check(outputs, row_bytes=1, is_gated=gate is not None)
    shape = (tile.outputs, tile.rows) if tile.swap else (tile.rows, tile.outputs)
    row_axis = 1 if tile.swap else 0

    def body(
        num_live_ref,  # [1]
        expert_ref,  # [M]
        x_ref,  # [R, K]
        x_scale_ref,  # [K / 128, R]
        w_ref,  # [E, O, K]
        w_scale_ref,  # [E, O / 128, K / 128]
        out_ref,  # [R, P]
    ):
        t, j = lax.axis_index("tile"), lax.axis_index("outputs")

        def product(x_tile, w_tile):
            def multiply(acc):
                left, right = (w_tile, x_tile) if tile.swap else (x_tile, w_tile)
                plgpu.wgmma(acc, left, right.T)
                return acc[...]

            return pl.run_scoped(multiply, ACC(shape))

        def step(index, x_tile, x_scale_tile, *tiles_and_totals):
            w_tiles, totals = tiles_and_totals[: len(parts)], tiles_and_totals[-1]
            layout = plgpu.Layout.WGMMA.reduce(1 - row_axis)
            row_scale = plgpu.load(x_scale_tile, layout=layout, optimized=False)
            added = []
            for part, w_tile, total in zip(parts, w_tiles, totals, strict=True):
                block = lax.div(part + j * tile.outputs, BLOCK)
                scale = row_scale * w_scale_ref[expert_ref[t], block, index[0]]
                added.append(total + product(x_tile, w_tile) * lax.broadcast_in_dim(scale, shape, [row_axis]))
            return tuple(added)

        @pl.when(t < num_live_ref[0])
        def _():
            def w_spec(part):
                return plgpu.BlockSpec((tile.outputs, DEPTH), lambda i: (part // tile.outputs + j, i))

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            w_expert = w_ref.at[expert_ref[t]]
            totals = plgpu.emit_pipeline(
                step,
                grid=(k // DEPTH,),
                max_concurrent_steps=min(tile.steps, k // DEPTH),
                init_carry=(zeros,) * len(parts),
                in_specs=[
                    plgpu.BlockSpec((tile.rows, DEPTH), lambda i: (t, i)),
                    plgpu.BlockSpec((None, tile.rows), lambda i: (i, t)),
                    *(w_spec(part) for part in parts),
                ],
            )(x_ref, x_scale_ref, *(w_expert for _ in parts))
            result = totals[0] if gate is None else GATES[gate](*totals)
            store_tile(result, out_ref, t, j, is_swapped=tile.swap)

    call = _kernel(body, num_rows, outputs, tile, "block_scaled_matmul", interpret)
    return call(num_live, expert, x.values, x.scales, w.values, w.scales)


@functools.partial(jax.jit, static_argnames=("tile", "gate", "interpret"))
def output_scaled_matmul_tiles(
    x: Float[Array, "R K"],
    w: QuantizedWeights,
    num_live: Int[Array, " 1"],
    expert: Int[Array, " M"],
    *,
    tile: QuantizedTile,
    gate: str | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "R P"]:
    """The same for rows of bfloat16 and weights with a scale for each output. Raises ValueError unless tile.swap."""
    (num_rows, k), outputs, parts = _sizes(x, w, gate)
    tile.check(outputs, row_bytes=2, is_gated=gate is not None)
    if not tile.swap:
        raise ValueError(
            f"{tile}: weights that pass through registers are the left operand, swap has to be True"
        )
    shape = (tile.outputs, tile.rows)
    wide_type = plgpu.SMEM((tile.outputs, DEPTH), jnp.bfloat16)  # in the interpreter only

    def body(
        num_live_ref,  # [1]
        expert_ref,  # [M]
        x_ref,  # [R, K]
        w_ref,  # [E, O, K]
        w_scale_ref,  # [E, O]
        out_ref,  # [R, P]
    ):
        t, j = lax.axis_index("tile"), lax.axis_index("outputs")

        def multiply(acc, w_tile, x_tile, w_s):
            wide = w_tile[...]
            if wide.dtype != jnp.int8:  # Hopper has no step from e4m3 to bfloat16
                wide = wide.astype(jnp.float32)
            wide = wide.astype(jnp.bfloat16)
            if w_s is None:
                plgpu.wgmma(acc, wide, x_tile.T)
            else:
                w_s[...] = wide
                plgpu.commit_smem()
                plgpu.wgmma(acc, w_s, x_tile.T)
            plgpu.wgmma_wait(0)  # the registers and the tile of x are used again

        def all_steps(w_s, *accs):
            def w_spec(part):
                return plgpu.BlockSpec((tile.outputs, DEPTH), lambda i: (part // tile.outputs + j, i))

            def step(_, x_tile, *w_tiles):
                for acc, w_tile in zip(accs, w_tiles, strict=True):
                    multiply(acc, w_tile, x_tile, w_s)

            w_expert = w_ref.at[expert_ref[t]]
            plgpu.emit_pipeline(
                step,
                grid=(k // DEPTH,),
                max_concurrent_steps=min(tile.steps, k // DEPTH),
                in_specs=[
                    plgpu.BlockSpec((tile.rows, DEPTH), lambda i: (t, i)),
                    *(w_spec(part) for part in parts),
                ],
            )(x_ref, *(w_expert for _ in parts))
            return tuple(acc[...] for acc in accs)

        @pl.when(t < num_live_ref[0])
        def _():
            def with_sums(w_s=None):
                return pl.run_scoped(functools.partial(all_steps, w_s), *(ACC(shape) for _ in parts))

            sums = with_sums() if interpret is None else pl.run_scoped(with_sums, wide_type)
            scaled = []
            for part, total in zip(parts, sums, strict=True):
                columns = pl.ds(part + j * tile.outputs, tile.outputs)
                layout = plgpu.Layout.WGMMA.reduce(1)
                scale = plgpu.load(w_scale_ref.at[expert_ref[t], columns], layout=layout, optimized=False)
                scaled.append(total * lax.broadcast_in_dim(scale, shape, [0]))
            result = scaled[0] if gate is None else GATES[gate](*scaled)
            store_tile(result, out_ref, t, j, is_swapped=True)

    call = _kernel(body, num_rows, outputs, tile, "output_scaled_matmul", interpret)
    return call(num_live, expert, x, w.values, w.scales)


def _sizes(x: Array, w: QuantizedWeights, gate: str | None) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """(shape of x, outputs of the result, first row in w of each part: the gates, and the ups after them)."""
    outputs = w.values.shape[1] // (1 if gate is None else 2)
    return (x.shape[0], x.shape[1]), outputs, (0,) if gate is None else (0, outputs)


def _kernel(
    body, num_rows: int, outputs: int, tile: QuantizedTile, name: str, interpret: InterpretParams | None
) -> Callable[..., Array]:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, outputs), jnp.bfloat16),
        grid=(outputs // tile.outputs, num_rows // tile.rows),
        grid_names=("outputs", "tile"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
        kernel_name=name,
    )
