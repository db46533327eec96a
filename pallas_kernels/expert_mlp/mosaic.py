"""Two grouped products on a Hopper GPU: the first ends in the gated activation, the second reads its tiles in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.kernel import grouped_matmul_tiles
from pallas_kernels.grouped_matmul.op import unfit_for_mosaic
from pallas_kernels.grouped_matmul.reference import GATES
from pallas_kernels.grouped_matmul.tiles import TileConfig, choose_tile, map_tiles, suggest_tile
from pallas_kernels.interpret import InterpretParams


def expert_mlp_mosaic(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    activation: str,
    *,
    tiles: tuple[TileConfig, TileConfig] | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "N D"]:
    """The op in one aligned order of rows: XLA gathers into it and out of it, and fuses that with dispatch and combine.

    tiles: of the two products, with the same number of rows; by default from the device's table or a suggestion.
    """
    num_rows = x_sorted.shape[0]
    if x_sorted.size == 0:
        return x_sorted
    gated, plain = tiles or choose_tiles(num_rows, w_down.shape)
    if gated.rows != plain.rows:
        raise ValueError(
            f"both products share one order of rows, the tiles have {gated.rows} and {plain.rows}"
        )
    order = map_tiles(group_sizes, num_rows, gated.rows)
    where = (order.num_live, order.expert)
    x = x_sorted[order.sorted_row]
    hidden = grouped_matmul_tiles(x, w_gate_up, *where, tile=gated, gate=activation, interpret=interpret)
    y = grouped_matmul_tiles(hidden, w_down, *where, tile=plain, interpret=interpret)
    return jnp.where(order.is_row[:, None], y[order.aligned_row], 0)


def choose_tiles(num_rows: int, w_down_shape: tuple[int, ...]) -> tuple[TileConfig, TileConfig]:
    """For the first and the second product, with as many rows. Suggestions have that; entries of a table, measured one
    product at a time, may not, and then the suggestions run.
    """
    num_experts, d, f = w_down_shape
    gated = choose_tile(num_rows, num_experts, d, f, is_gated=True)
    plain = choose_tile(num_rows, num_experts, f, d, is_gated=False)
    if gated.rows == plain.rows:
        return gated, plain
    return (
        suggest_tile(num_rows, num_experts, d, f, is_gated=True),
        suggest_tile(num_rows, num_experts, f, d, is_gated=False),
    )


def unfit_for_expert_mlp(
    x: Array | jax.ShapeDtypeStruct,
    w_gate_up: Array | jax.ShapeDtypeStruct,
    w_down: Array | jax.ShapeDtypeStruct,
    activation: str,
) -> str | None:
    """Why the kernel cannot take these operands, or None."""
    if activation not in GATES:
        return f"has no {activation!r}, only {tuple(GATES)}"
    return unfit_for_mosaic(x, w_gate_up, is_gated=True) or unfit_for_mosaic(x, w_down, is_gated=False)
