"""Decode attention on Hopper: the keys of a row are cut into splits that run in parallel, and then combined.

The query heads of one kv head are rows of one 64-row operand; most of it is padding that is never stored. That costs
nothing that counts, for decode waits for the keys.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.paged_attention.tiles import (
    LOG2_E,
    QUERY_ROWS,
    TILE_KEYS,
    KeyRange,
    attend_tiles,
    check_steps,
    unfit_for_mosaic,
)
from pallas_kernels.tuning import TileTables

NUM_CORES = 132  # of an H100 or H200
BLOCKS_A_CORE = (
    2  # that fit into its shared memory with heads of 128 and two steps; with three steps one would
)
MIN_TILES_A_SPLIT = 4  # below, storing and combining a split costs as much as it saves
MAX_SPLITS = 32


@dataclass(frozen=True)
class DecodeTiles:
    """splits: parts that a row's keys are cut into, at most; steps: tiles in flight in each."""

    splits: int
    steps: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= MAX_SPLITS or not 1 <= self.steps <= 8:
            raise ValueError(f"{self}: splits must be in [1, {MAX_SPLITS}], steps in [1, 8]")


def choose_decode_tiles(
    num_rows: int, num_kv_heads: int, max_kv_len: int, head_dim: int, tables: TileTables | None = None
) -> DecodeTiles:
    """The device's table where it has this shape, else what the sizes suggest."""
    key = decode_key(num_rows, num_kv_heads, max_kv_len, head_dim)
    found = (tables or TileTables.of_package()).look_up("paged_attention", key)
    if found is not None:
        return DecodeTiles(**found)
    return suggest_decode_tiles(num_rows, num_kv_heads, max_kv_len, head_dim)


def decode_key(num_rows: int, num_kv_heads: int, max_kv_len: int, head_dim: int) -> str:
    """A shape's name in the tables; rows and keys up to a power of two."""
    rows, keys = (1 << max(0, n - 1).bit_length() for n in (num_rows, max_kv_len))
    return f"rows={rows},kv_heads={num_kv_heads},keys={keys},head_dim={head_dim}"


def suggest_decode_tiles(num_rows: int, num_kv_heads: int, max_kv_len: int, head_dim: int) -> DecodeTiles:
    """Enough splits that every core has its blocks, and not so many that they are short; not measured on a GPU."""
    max_tiles = -(-max_kv_len // TILE_KEYS)
    wanted = -(-NUM_CORES * BLOCKS_A_CORE // (num_rows * num_kv_heads))
    splits = max(1, min(wanted, -(-max_tiles // MIN_TILES_A_SPLIT), MAX_SPLITS))
    return DecodeTiles(splits, steps=3 if head_dim <= 64 else 2)


def paged_attention_mosaic(
    q: Float[Array, "B H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    tiles: DecodeTiles | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "B H Dh"]:
    """The op. Raises NotImplementedError for operands that the kernel does not take, ValueError for tiles too large."""
    for reason in unfit_for_mosaic(q, pages).values():
        raise NotImplementedError(f"mosaic: {reason}")
    if tiles is None:
        max_kv_len = page_table.shape[1] * pages.shape[3]
        tiles = choose_decode_tiles(q.shape[0], pages.shape[2], max_kv_len, q.shape[2])
    check_steps(tiles.steps, q.shape[2])
    return _decode(q, pages, page_table, kv_len, sinks, window, soft_cap, tiles, interpret)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))  # one compilation for all layers
def _decode(
    q: Array,
    pages: Array,
    page_table: Array,
    kv_len: Array,
    sinks: Array | None,
    window: int | None,
    soft_cap: float | None,
    tiles: DecodeTiles,
    interpret: InterpretParams | None,
) -> Array:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    stored = -(-group // 8) * 8  # rows of the operand that are real, to what shared memory can be cut at
    grouped = q.astype(pages.dtype).reshape(num_rows, num_kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, stored - group), (0, 0)))

    def body(
        q_ref,  # [B, K, G, Dh]
        pages_ref,  # [N, 2, K, S, Dh]
        table_ref,  # [B, P]
        kv_len_ref,  # [B]
        out_ref,  # [splits, B, K, G, Dh]
        max_ref,  # [splits, B, K, G]
        sum_ref,  # [splits, B, K, G]
    ):
        row, kv_head, split = (lax.axis_index(name) for name in ("row", "kv_head", "split"))
        keys = keys_of_split(kv_len_ref[row], row, kv_head, split, tiles.splits, window)

        def attend(q_s, barrier):
            # Rows past `stored` stay as they are: a row of the result depends on its own query only.
            plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q_s.at[pl.ds(0, stored)], barrier)
            plgpu.barrier_wait(barrier)
            return attend_tiles(
                pages_ref,
                table_ref,
                q_s,
                keys,
                keys.holds,
                soft_cap=soft_cap,
                steps=tiles.steps,
                is_interpreted=interpret is not None,
            )

        q_type = plgpu.SMEM((QUERY_ROWS, head_dim), pages.dtype)
        results = pl.run_scoped(attend, q_type, plgpu.Barrier())

        # Here and not above, so that it takes the place of the tiles.
        @functools.partial(
            pl.run_scoped,
            out_s=plgpu.SMEM((QUERY_ROWS, head_dim), jnp.float32),
            max_s=plgpu.SMEM((QUERY_ROWS,), jnp.float32),
            sum_s=plgpu.SMEM((QUERY_ROWS,), jnp.float32),
        )
        def _(out_s, max_s, sum_s):
            out_s[...], max_s[...], sum_s[...] = results
            plgpu.commit_smem()
            for source, to in ((out_s, out_ref), (max_s, max_ref), (sum_s, sum_ref)):
                plgpu.copy_smem_to_gmem(source.at[pl.ds(0, stored)], to.at[split, row, kv_head])
            plgpu.wait_smem_to_gmem(0)

    per_row = jax.ShapeDtypeStruct((tiles.splits, num_rows, num_kv_heads, stored), jnp.float32)
    call: Callable[..., tuple[Array, Array, Array]] = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((*per_row.shape, head_dim), jnp.float32), per_row, per_row),
        grid=(num_rows, num_kv_heads, tiles.splits),
        grid_names=("row", "kv_head", "split"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
        kernel_name="paged_attention",
    )
    parts = call(grouped, pages, page_table.astype(jnp.int32), kv_len.astype(jnp.int32))
    sinks = None if sinks is None else jnp.reshape(sinks, (num_kv_heads, group))
    out, row_max, row_sum = (part[:, :, :, :group] for part in parts)
    out = combine_splits(out, row_max, row_sum, sinks)
    return out.reshape(q.shape).astype(q.dtype)


def keys_of_split(kv_len, row, kv_head, split, splits: int, window: int | None) -> KeyRange:
    """Split s of a row takes tiles [s, s + 1) * per_split of those that its window touches."""
    first_key = 0 if window is None else jnp.maximum(kv_len - window, 0)
    row_first = lax.div(first_key, TILE_KEYS)
    row_end = lax.div(kv_len + (TILE_KEYS - 1), TILE_KEYS)
    per_split = jnp.maximum(lax.div(row_end - row_first + (splits - 1), splits), MIN_TILES_A_SPLIT)
    first = row_first + split * per_split
    num_tiles = jnp.maximum(jnp.minimum(first + per_split, row_end) - first, 0)
    return KeyRange(row, kv_head, first, num_tiles, first_key, kv_len)


def combine_splits(
    out: Float[Array, "splits B K G Dh"],
    row_max: Float[Array, "splits B K G"],
    row_sum: Float[Array, "splits B K G"],
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "B K G Dh"]:
    """Each split has its own maximum; one that had no tiles has the lowest, and no weight. The sink joins here, once."""
    peak = jnp.max(row_max, axis=0)
    sink_score = None
    if sinks is not None:
        sink_score = jnp.broadcast_to(sinks.astype(jnp.float32)[None] * LOG2_E, peak.shape)
        peak = jnp.maximum(peak, sink_score)
    weight = jnp.exp2(row_max - peak[None])
    total = jnp.sum(row_sum * weight, axis=0)
    if sink_score is not None:
        total += jnp.exp2(sink_score - peak)
    mixed = jnp.sum(out * weight[..., None], axis=0)
    return (
        mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    )  # a row without keys gives zeros
