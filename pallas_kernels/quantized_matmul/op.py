"""The product of sorted rows with quantised experts: checks, the choice of backend, and rows quantised on their way."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.grouped_matmul.reference import GATES
from pallas_kernels.grouped_matmul.tiles import map_tiles
from pallas_kernels.interpret import InterpretParams
from pallas_kernels.quantized_matmul.dispatch import gather_rows
from pallas_kernels.quantized_matmul.kernel import block_scaled_matmul_tiles, output_scaled_matmul_tiles
from pallas_kernels.quantized_matmul.quantise import (
    BLOCK,
    LARGEST,
    QuantizedRows,
    QuantizedWeights,
    quantise_rows,
)
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.tiles import QuantizedTile, choose_quantized_tile
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla

BACKENDS = ("mosaic", "xla", "reference")


def quantized_matmul(
    x_sorted: QuantizedRows | Float[Array, "N K"],
    w: QuantizedWeights,
    group_sizes: Int[Array, " E"],
    *,
    gate: str | None = None,
    backend: str | None = None,
) -> Float[Array, "N P"]:
    """Row n of group e becomes w[e] @ x in bfloat16, accumulated in float32; rows past the groups return as zeros.

    x_sorted: floats, or rows that `permute_quantised` made. Where w has scales for blocks, floats are quantised here.
    gate: None, or a name of GATES: w then holds gates over ups, and the result is gate(w[e][:P] @ x, w[e][P:] @ x).
    backend: a name of BACKENDS; by default the best that runs here.
    Raises ValueError for operands that do not fit each other.
    """
    _check(x_sorted, w, group_sizes, gate)
    if w.has_blocks and not isinstance(x_sorted, QuantizedRows):
        x_sorted = quantise_rows(x_sorted)
    name = choose_quantized_matmul(w, gate, backend).name
    with jax.named_scope("quantized_matmul"):
        if name == "mosaic":
            return quantized_matmul_mosaic(x_sorted, w, group_sizes, gate)
        run = quantized_matmul_xla if name == "xla" else quantized_matmul_reference
        return run(x_sorted, w, group_sizes, gate)


def choose_quantized_matmul(
    w: QuantizedWeights, gate: str | None = None, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these weights here, and why. Raises as `choose_backend` does."""
    reason = _unfit_for_mosaic(w, is_gated=gate is not None)
    unfit: Mapping[str, str] = {} if reason is None else {"mosaic": reason}
    return choose_backend(BACKENDS, backend, unfit=unfit)


def quantized_matmul_mosaic(
    x_sorted: QuantizedRows | Float[Array, "N K"],
    w: QuantizedWeights,
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
    *,
    tile: QuantizedTile | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "N P"]:
    """The op by the Hopper kernels. tile: by default the device's table, else a suggestion."""
    num_rows, k = (x_sorted.values if isinstance(x_sorted, QuantizedRows) else x_sorted).shape
    num_experts, outputs = w.values.shape[0], w.values.shape[1] // (1 if gate is None else 2)
    if num_rows == 0:
        return jnp.zeros((0, outputs), jnp.bfloat16)
    if tile is None:
        kind = "blocks" if w.has_blocks else "outputs"
        tile = choose_quantized_tile(num_rows, num_experts, k, outputs, kind, is_gated=gate is not None)
    tiles = map_tiles(group_sizes, num_rows, tile.rows)
    where = (tiles.num_live, tiles.expert)
    if isinstance(x_sorted, QuantizedRows):
        x = gather_rows(x_sorted, tiles.sorted_row)
        y = block_scaled_matmul_tiles(x, w, *where, tile=tile, gate=gate, interpret=interpret)
    else:
        x = x_sorted.astype(jnp.bfloat16)[tiles.sorted_row]
        y = output_scaled_matmul_tiles(x, w, *where, tile=tile, gate=gate, interpret=interpret)
    return jnp.where(tiles.is_row[:, None], y[tiles.aligned_row], 0)


def _unfit_for_mosaic(w: QuantizedWeights, *, is_gated: bool) -> str | None:
    num_experts, outputs, k = w.values.shape
    columns = outputs // (2 if is_gated else 1)
    if num_experts == 0:
        return "takes at least one expert"
    if k == 0 or k % BLOCK:
        return f"takes multiples of {BLOCK}, the contraction is {k}"
    needed = BLOCK if w.has_blocks else 64
    if columns == 0 or columns % needed:
        return f"takes multiples of {needed}, the outputs are {columns}"
    return None


def _check(x: QuantizedRows | Array, w: QuantizedWeights, group_sizes: Array, gate: str | None) -> None:
    rows = x.values if isinstance(x, QuantizedRows) else x
    values, scales = w.values, w.scales
    if rows.ndim != 2 or values.ndim != 3 or rows.shape[1] != values.shape[2]:
        raise ValueError(
            f"x_sorted has shape {rows.shape}, w {values.shape}: expected [N, K] and [E, O, K] with one K"
        )
    if values.dtype not in LARGEST or (w.has_blocks and values.dtype == jnp.int8):
        raise ValueError(
            f"w is {values.dtype} with scales {scales.shape}: expected e4m3, or int8 without blocks"
        )
    num_experts, outputs, k = values.shape
    expected = (num_experts, outputs // BLOCK, k // BLOCK) if w.has_blocks else (num_experts, outputs)
    if scales.shape != expected:
        raise ValueError(f"w of shape {values.shape} has scales of shape {scales.shape}, expected {expected}")
    if isinstance(x, QuantizedRows) and not w.has_blocks:
        raise ValueError("x_sorted is quantised, but w has no scales for blocks")
    if isinstance(x, QuantizedRows) and x.scales.shape != (k // BLOCK, rows.shape[0]):
        raise ValueError(
            f"x_sorted has scales of shape {x.scales.shape}, expected {(k // BLOCK, rows.shape[0])}"
        )
    if group_sizes.shape != (num_experts,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{group_sizes.shape}, expected int32{(num_experts,)}"
        )
    if gate is not None and (gate not in GATES or outputs % 2):
        raise ValueError(f"gate {gate!r} is not one of {tuple(GATES)}, or {outputs} outputs are odd")
