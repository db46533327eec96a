"""Prefill attention on Hopper: 64 tokens of one row and one head a block, over the keys that they may see.

    rows of 100, 70, 0 tokens, page size 64         flat places   0..64 | 64..100 . | 128..192 | 192..198 .
    blocks (row, offset in the chunk)                             (0, 0)  (0, 64)     (1, 0)     (1, 64)     dead, ...

A block may run past its row's end, over the next row's tokens where pages are small. So it is stored page by page, and only
pages that hold a token of its own.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.paged_attention.tiles import (
    LOG2_E,
    LOW_SCORE,
    QUERY_ROWS,
    TILE_KEYS,
    KeyRange,
    attend_tiles,
    check_steps,
    pinned,
    unfit_for_mosaic,
)
from pallas_kernels.prefill_attention.reference import row_of_tokens


def prefill_attention_mosaic(
    q: Float[Array, "T H Dh"],
    pages: Float[Array, "N 2 K S Dh"],
    page_table: Int[Array, "R P"],
    row_start: Int[Array, " R"],
    row_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    window: int | None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    steps: int | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "T H Dh"]:
    """The op. steps: tiles of keys in flight. Raises NotImplementedError for operands that the kernel does not
    take, ValueError for too many steps.
    """
    for reason in unfit_for_mosaic(q, pages).values():
        raise NotImplementedError(f"mosaic: {reason}")
    steps = (3 if q.shape[2] <= 64 else 2) if steps is None else steps
    check_steps(steps, q.shape[2])
    values = (a.astype(jnp.int32) for a in (page_table, row_start, row_len, context_len))
    return _prefill(q, pages, *values, sinks, window, soft_cap, steps, interpret)


@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10))  # one compilation for all layers
def _prefill(
    q: Array,
    pages: Array,
    page_table: Array,
    row_start: Array,
    row_len: Array,
    context_len: Array,
    sinks: Array | None,
    window: int | None,
    soft_cap: float | None,
    steps: int,
    interpret: InterpretParams | None,
) -> Array:
    num_tokens, num_heads, head_dim = q.shape
    group, page_size = num_heads // pages.shape[2], pages.shape[3]
    piece = min(page_size, QUERY_ROWS)  # tokens that one copy stores
    blocks = map_blocks(row_len, num_tokens)
    queries = jnp.pad(q.astype(pages.dtype), ((0, max(0, QUERY_ROWS - num_tokens)), (0, 0), (0, 0)))
    sink_scores = jnp.full((num_heads,), LOW_SCORE) if sinks is None else sinks.astype(jnp.float32) * LOG2_E

    def body(
        num_live_ref,  # [1]
        row_ref,  # [M]
        offset_ref,  # [M]
        row_start_ref,  # [R]
        row_len_ref,  # [R]
        context_len_ref,  # [R]
        q_ref,  # [T, H, Dh]
        pages_ref,  # [N, 2, K, S, Dh]
        table_ref,  # [R, P]
        sinks_ref,  # [H]
        out_ref,  # [T, H, Dh]
    ):
        head, block = lax.axis_index("head"), lax.axis_index("block")

        def attend(row, first_piece, position, num_queries):
            end_key = position + num_queries
            first_key = 0 if window is None else jnp.maximum(position - window + 1, 0)
            first_tile = lax.div(first_key, TILE_KEYS)
            num_tiles = lax.div(end_key + (TILE_KEYS - 1), TILE_KEYS) - first_tile
            keys = KeyRange(row, lax.div(head, group), first_tile, num_tiles, first_key, end_key)

            def may_see(key):
                query = position + plgpu.broadcasted_iota(jnp.int32, key.shape, 0, layout=plgpu.Layout.WGMMA)
                return (key <= query) if window is None else (key <= query) & (key > query - window)

            def with_queries(q_s, barrier):
                rows = pl.ds(first_piece * piece, QUERY_ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_s, barrier)
                plgpu.barrier_wait(barrier)
                return attend_tiles(
                    pages_ref,
                    table_ref,
                    q_s,
                    keys,
                    may_see,
                    soft_cap=soft_cap,
                    steps=steps,
                    is_interpreted=interpret is not None,
                    first_max=sinks_ref[head],
                    first_sum=0.0 if sinks is None else 1.0,
                )

            q_type = plgpu.SMEM((QUERY_ROWS, head_dim), pages.dtype)
            mixed, _, total = pl.run_scoped(with_queries, q_type, plgpu.Barrier())
            return pinned(mixed * pinned(lax.broadcast_in_dim(pinned(1.0 / total), mixed.shape, [0])))

        @pl.when(block < num_live_ref[0])
        def _():
            row, offset = row_ref[block], offset_ref[block]
            # Counted in pieces, so that the compiler sees places that are multiples of a tile in shared memory. Where it
            # does not, it looks for a layout without end.
            first_piece = lax.div(row_start_ref[row] + offset, piece)
            num_queries = jnp.minimum(row_len_ref[row] - offset, QUERY_ROWS)
            result = attend(row, first_piece, context_len_ref[row] + offset, num_queries)

            @functools.partial(pl.run_scoped, out_s=plgpu.SMEM((QUERY_ROWS, head_dim), pages.dtype))
            def _(out_s):
                out_s[...] = pinned(result.astype(out_s.dtype))
                plgpu.commit_smem()
                for i in range(QUERY_ROWS // piece):

                    @pl.when(i * piece < num_queries)
                    def _(i=i):
                        to = out_ref.at[pl.ds((first_piece + i) * piece, piece), head]
                        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(i * piece, piece)], to)

                plgpu.wait_smem_to_gmem(0)

    call: Callable[..., Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(queries.shape, pages.dtype),
        grid=(num_heads, blocks.row.shape[0]),
        grid_names=("head", "block"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
        kernel_name="prefill_attention",
    )
    out = call(*blocks, row_start, row_len, context_len, queries, pages, page_table, sink_scores)
    is_real = row_of_tokens(row_start, row_len, num_tokens)[2]
    return jnp.where(is_real[:, None, None], out[:num_tokens], 0).astype(
        q.dtype
    )  # the rest was never written


class QueryBlocks(NamedTuple):
    """Blocks of 64 queries of one row, M in all; those from num_live on are dead."""

    num_live: Int[Array, " 1"]
    row: Int[Array, " M"]
    offset: Int[Array, " M"]  # in the row's chunk


def map_blocks(row_len: Int[Array, " R"], num_tokens: int) -> QueryBlocks:
    """Which 64 tokens each block takes, with no read by the host: rows in order, the last block of each may be short."""
    num_rows = row_len.shape[0]
    max_blocks = num_tokens // QUERY_ROWS + min(num_rows, num_tokens)
    blocks_of = -(-row_len // QUERY_ROWS)
    last = jnp.cumsum(blocks_of, dtype=jnp.int32)
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.sum(last[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    return QueryBlocks(last[-1:], row, (block - (last - blocks_of)[row]) * QUERY_ROWS)
