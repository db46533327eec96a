"""How the product is cut: tile sizes, and the map from tiles to experts that is computed on the device."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.tuning import TileTables

MAX_SHARED_BYTES = 227 * 1024  # of one block on Hopper
BARRIER_BYTES = 1024  # room for barriers and alignment
WGMMA_ROWS = 64  # the left operand of one warpgroup's product
ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class TileConfig:
    """One tile of the result.

    rows: rows of x; multiple of 64, or of 8 up to 256 where `swap`.
    outputs: rows of w, for a gated product of each of its halves; multiple of 8 up to 256, or of 64 where `swap`.
    depth: how much of the contraction one copy brings; multiple of 64.
    steps: copies in flight.
    swap: the weights are the operand of 64 rows and the tokens the other, so that few rows need little padding.
    """

    rows: int
    outputs: int
    depth: int = 64
    steps: int = 4
    swap: bool = False

    def shared_bytes(self, *, is_gated: bool) -> int:
        """Shared memory of a block: operands in flight, later the tile of the result in their place, and barriers."""
        operands = self.steps * (self.rows + self.outputs * (2 if is_gated else 1)) * self.depth
        return ELEMENT_BYTES * max(operands, self.rows * self.outputs) + BARRIER_BYTES

    def check(self, k: int, outputs: int, *, is_gated: bool) -> None:
        """Raises ValueError where the tile is no tile, NotImplementedError where it does not divide the product.

        outputs: columns of the result.
        """
        left, right = (self.outputs, self.rows) if self.swap else (self.rows, self.outputs)
        if left % WGMMA_ROWS or right % 8 or not 0 < right <= 256 or left <= 0:
            raise ValueError(
                f"{self}: one side is a multiple of {WGMMA_ROWS} (got {left}), the other of 8 up to 256 (got {right})"
            )
        if self.depth <= 0 or self.depth % 64 or self.steps < 2:
            raise ValueError(
                f"{self}: depth is a multiple of 64 (got {self.depth}), steps >= 2 (got {self.steps})"
            )
        needed = self.shared_bytes(is_gated=is_gated)
        if needed > MAX_SHARED_BYTES:
            raise ValueError(f"{self} needs {needed} bytes of shared memory, a block has {MAX_SHARED_BYTES}")
        if k % self.depth:
            raise NotImplementedError(f"the contraction {k} is no multiple of the tile's depth {self.depth}")
        if outputs % self.outputs:
            raise NotImplementedError(f"{outputs} outputs are no multiple of the tile's {self.outputs}")


class TileMap(NamedTuple):
    """Rows by tile: the aligned order has M * rows rows, and every group starts at a whole tile of it.

    Tiles from num_live on are dead: nobody computes them.
    """

    num_live: Int[Array, " 1"]
    expert: Int[Array, " M"]
    sorted_row: Int[Array, " R"]  # for each aligned row; past a group's end some other row
    aligned_row: Int[Array, " N"]  # for each sorted row; past all groups 0
    is_row: Bool[Array, " N"]  # False past all groups


def max_tiles(num_rows: int, num_experts: int, rows: int) -> int:
    """Tiles that any split of the rows over the experts can need."""
    return num_rows // rows + min(num_experts, num_rows)


def map_tiles(group_sizes: Int[Array, " E"], num_rows: int, rows: int) -> TileMap:
    """The map for tiles of `rows` rows, with no read by the host.

    Example, rows 4, groups 3, 5, 0, 1: experts 0, 1, 1, 3, dead, dead.

        sorted    a a a b b b b b d
        aligned   a a a . | b b b b | b . . . | d . . . | dead | dead
    """
    sizes = group_sizes.astype(jnp.int32)
    num_experts = sizes.shape[0]
    ends, last = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // rows))
    starts, first = ends - sizes, last - (-(-sizes // rows))  # of each group: sorted row, tile

    tile = jnp.arange(max_tiles(num_rows, num_experts, rows), dtype=jnp.int32)
    expert = _group_of(tile, last, num_experts)
    start_of_tile = starts[expert] + (tile - first[expert]) * rows
    sorted_row = (start_of_tile[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]).reshape(-1)

    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = _group_of(row, ends, num_experts)
    is_row = row < ends[-1]
    aligned_row = jnp.where(is_row, first[owner] * rows + row - starts[owner], 0)
    return TileMap(last[-1:], expert, jnp.clip(sorted_row, 0, num_rows - 1), aligned_row, is_row)


def _group_of(index: Int[Array, " I"], ends: Int[Array, " E"], num_groups: int) -> Int[Array, " I"]:
    """The group that holds each index, given where the groups end; past all of them the last."""
    return jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32), num_groups - 1)


def choose_tile(
    num_rows: int, num_experts: int, k: int, outputs: int, *, is_gated: bool, tables: TileTables | None = None
) -> TileConfig:
    """The device's table where it has this product, else what the sizes suggest.

    Raises NotImplementedError where no tile divides the product.
    """
    key = tile_key(num_rows, num_experts, k, outputs, is_gated=is_gated)
    found = (tables or TileTables.of_package()).look_up("grouped_matmul", key)
    if found is not None:
        return TileConfig(**found)
    return suggest_tile(num_rows, num_experts, k, outputs, is_gated=is_gated)


def tile_key(num_rows: int, num_experts: int, k: int, outputs: int, *, is_gated: bool) -> str:
    """A product's name in the tables; rows up to a power of two, so that one entry serves the rungs between."""
    rounded = 1 << max(0, num_rows - 1).bit_length()
    return f"rows={rounded},experts={num_experts},k={k},outputs={outputs},gated={int(is_gated)}"


def suggest_tile(num_rows: int, num_experts: int, k: int, outputs: int, *, is_gated: bool) -> TileConfig:
    """Untested on a GPU. Swapped while a group is far from filling 64 rows: then the weights' bandwidth is all that
    counts, and deep copies keep it busy. Above, one warpgroup's accumulators stay near 128 registers.
    """
    mean_group = num_rows / num_experts
    depth = 128 if k % 128 == 0 else 64
    if mean_group <= 32:
        rows = next(size for size in (8, 16, 32, 64) if mean_group <= size / 2 or size == 64)
        tile = TileConfig(rows, 64, depth, 4, swap=True)
    else:
        wanted = (128, 96, 64, 32) if is_gated else (256, 128, 96, 64, 32)
        fitting = next((size for size in wanted if outputs % size == 0), 64)
        tile = TileConfig(64, fitting, 64, 4)
    while tile.shared_bytes(is_gated=is_gated) > MAX_SHARED_BYTES:
        tile = replace(tile, steps=tile.steps - 1)
    tile.check(k, outputs, is_gated=is_gated)
    return tile
