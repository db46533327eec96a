"""The product of sorted rows with their experts' matrices, alone; `expert_mlp` chains two of them without the reordering."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.grouped_matmul.kernel import grouped_matmul_tiles
from pallas_kernels.grouped_matmul.reference import GATES, grouped_matmul_reference
from pallas_kernels.grouped_matmul.tiles import TileConfig, choose_tile, map_tiles
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from pallas_kernels.interpret import InterpretParams

BACKENDS = ("mosaic", "xla", "reference")


def grouped_matmul(
    x_sorted: Float[Array, "N K"],
    w: Float[Array, "E O K"],
    group_sizes: Int[Array, " E"],
    *,
    gate: str | None = None,
    backend: str | None = None,
) -> Float[Array, "N P"]:
    """Row n of group e becomes w[e] @ x, accumulated in float32; rows past the groups return as zeros.

    gate: None, or a name of GATES: w then holds gates over ups, and the result is gate(w[e][:P] @ x, w[e][P:] @ x).
    backend: a name of BACKENDS; by default the best that runs here.
    Raises ValueError for shapes that do not fit each other, NotImplementedError for a backend that cannot take them.
    """
    _check(x_sorted, w, group_sizes, gate)
    name = choose_grouped_matmul(x_sorted, w, gate, backend).name
    with jax.named_scope("grouped_matmul"):
        if name == "mosaic":
            return grouped_matmul_mosaic(x_sorted, w, group_sizes, gate)
        run = grouped_matmul_xla if name == "xla" else grouped_matmul_reference
        return run(x_sorted, w, group_sizes, gate)


def choose_grouped_matmul(
    x: Array | jax.ShapeDtypeStruct,
    w: Array | jax.ShapeDtypeStruct,
    gate: str | None = None,
    backend: str | None = None,
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    reason = unfit_for_mosaic(x, w, is_gated=gate is not None)
    return choose_backend(BACKENDS, backend, unfit={} if reason is None else {"mosaic": reason})


def grouped_matmul_mosaic(
    x_sorted: Float[Array, "N K"],
    w: Float[Array, "E O K"],
    group_sizes: Int[Array, " E"],
    gate: str | None = None,
    *,
    tile: TileConfig | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "N P"]:
    """The op by the Hopper kernel. tile: by default the device's table, else a suggestion."""
    num_rows, (num_experts, outputs, k) = x_sorted.shape[0], w.shape
    if num_rows == 0:
        return jnp.zeros((0, outputs // (1 if gate is None else 2)), x_sorted.dtype)
    if tile is None:
        columns = outputs // (1 if gate is None else 2)
        tile = choose_tile(num_rows, num_experts, k, columns, is_gated=gate is not None)
    tiles = map_tiles(group_sizes, num_rows, tile.rows)
    y = grouped_matmul_tiles(
        x_sorted[tiles.sorted_row], w, tiles.num_live, tiles.expert, tile=tile, gate=gate, interpret=interpret
    )
    return jnp.where(tiles.is_row[:, None], y[tiles.aligned_row], 0)


def unfit_for_mosaic(
    x: Array | jax.ShapeDtypeStruct, w: Array | jax.ShapeDtypeStruct, *, is_gated: bool
) -> str | None:
    """Why the kernel cannot take these operands, or None. Any number of rows and any group sizes will do."""
    for name, array in (("x", x), ("w", w)):
        if array.dtype != jnp.bfloat16:
            return f"takes bfloat16, {name} is {array.dtype}"
    num_experts, outputs, k = w.shape
    columns = outputs // (2 if is_gated else 1)
    for size, what in ((k, "contraction"), (columns, "outputs")):
        if size == 0 or size % 64:
            return f"takes multiples of 64, the {what} is {size}"
    if num_experts == 0:
        return "takes at least one expert"
    return None


def _check(x: Array, w: Array, group_sizes: Array, gate: str | None) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"x_sorted has shape {x.shape}, w {w.shape}: expected [N, K] and [E, O, K] with one K"
        )
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{group_sizes.shape}, expected int32{w.shape[:1]}"
        )
    if gate is not None and gate not in GATES:
        raise ValueError(f"gate {gate!r} is not one of {tuple(GATES)}")
    if gate is not None and w.shape[1] % 2:
        raise ValueError(f"w has {w.shape[1]} rows an expert, a gated product needs an even number")
