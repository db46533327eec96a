"""The loop over tiles of keys that both Mosaic kernels run: TMA through the page table, wgmma, softmax online.

A tile is 64 keys of one kv head. It lies in one page, or in several that are copied one under another:

    page size 16, tile 2 (keys 128..192)    table columns  8  9 10 11   ->  rows 0..16, 16..32, 32..48, 48..64 of the tile

One warpgroup, 64 query rows. Scores live in registers; so do the sums and, on the GPU, the probabilities.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERY_ROWS = 64  # the left operand of one warpgroup's product
TILE_KEYS = 64
LOW_SCORE = -1e30  # finite, so that (-inf) - (-inf) never appears
LOG2_E = math.log2(math.e)  # the softmax is taken in base 2
HEAD_DIMS = (64, 128, 256)


def unfit_for_mosaic(
    q: jax.Array | jax.ShapeDtypeStruct, pages: jax.Array | jax.ShapeDtypeStruct
) -> Mapping[str, str]:
    """{"mosaic": why the kernels do not take these operands}, empty where they do."""
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    group = q.shape[1] // num_kv_heads
    if pages.dtype != jnp.bfloat16:
        return {"mosaic": f"takes pages of bfloat16, got {pages.dtype}"}
    if head_dim not in HEAD_DIMS:
        return {"mosaic": f"takes a head size in {HEAD_DIMS}, got {head_dim}"}
    if page_size not in (16, 32) and page_size % TILE_KEYS:
        return {"mosaic": f"takes pages of 16, 32 or a multiple of {TILE_KEYS} tokens, got {page_size}"}
    if group > QUERY_ROWS:
        return {"mosaic": f"takes at most {QUERY_ROWS} heads a kv head, got {group}"}
    return {}


@dataclass(frozen=True)
class KeyRange:
    """Tiles that one block of a kernel visits, and which keys in them are real. All traced int32 scalars."""

    row: Any  # of the page table
    kv_head: Any
    first_tile: Any
    num_tiles: Any  # may be 0
    first_key: Any  # keys before it are seen by no query of the block, and may be NaN
    end_key: Any  # as are those from here on


def attend_tiles(
    pages_ref,  # [N, 2, K, S, Dh] in GMEM
    table_ref,  # [R, P] in GMEM
    q_s,  # [64, Dh] in SMEM
    keys: KeyRange,
    may_see: Callable[[jax.Array], jax.Array],
    *,
    soft_cap: float | None,
    steps: int,
    is_interpreted: bool,
    first_max=LOW_SCORE,
    first_sum=0.0,
):
    """Unnormalised (sum of p * v [64, Dh], maximum [64], sum of p [64]); scores are in base 2.

    may_see: positions of a tile's keys [64, 64] to which query rows see which, beyond the range of `keys`.
    steps: tiles in flight. first_max, first_sum: what the softmax begins with, for a sink.
    is_interpreted: the interpreter has neither in-place accumulators nor left operands in registers.
    """
    dtype, page_size, head_dim = pages_ref.dtype, pages_ref.shape[3], pages_ref.shape[4]
    piece = min(page_size, TILE_KEYS)  # keys that one copy brings
    pieces = TILE_KEYS // piece
    pieces_a_page = page_size // piece
    last_page = lax.div(keys.end_key - 1, page_size)
    wgmma, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)

    def fetch(tile, slot, k_s, v_s, k_barrier, v_barrier):
        for i in range(pieces):
            place = (keys.first_tile + tile) * pieces + i
            # The last tile may reach past the row's pages: its surplus is read from the last one and masked.
            column = jnp.minimum(lax.div(place, pieces_a_page), last_page)
            page = table_ref[keys.row, column]
            rows = pl.ds(lax.rem(place, pieces_a_page) * piece, piece)
            to = pl.ds(i * piece, piece)
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, 0, keys.kv_head, rows], k_s.at[slot, to], k_barrier.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, 1, keys.kv_head, rows], v_s.at[slot, to], v_barrier.at[slot]
            )

    def scores_of(k_tile, first_of_tile):
        def multiply(acc):
            plgpu.wgmma(acc, q_s, k_tile.T)
            return acc[...]

        z = pl.run_scoped(multiply, plgpu.ACC((QUERY_ROWS, TILE_KEYS)))
        z = _scale(z, head_dim, soft_cap)
        position = first_of_tile + plgpu.broadcasted_iota(
            jnp.int32, (QUERY_ROWS, TILE_KEYS), 1, layout=wgmma
        )
        is_seen = (position >= keys.first_key) & (position < keys.end_key) & may_see(position)
        return jnp.where(is_seen, z, LOW_SCORE)

    def zero_unseen(v_tile, first_of_tile):
        """A weight of 0 times a stale NaN would still be NaN."""
        is_edge = (first_of_tile < keys.first_key) | (first_of_tile + TILE_KEYS > keys.end_key)

        @pl.when(is_edge)
        def _():
            v = plgpu.load(v_tile, layout=wgmma)
            position = first_of_tile + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=wgmma)
            is_real = (position >= keys.first_key) & (position < keys.end_key)
            v_tile[...] = jnp.where(is_real, v, jnp.zeros_like(v))
            plgpu.commit_smem()

    def add_values(acc, p, v_tile, p_s):
        if not is_interpreted:
            return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_tile))(plgpu.ACC.init(acc))
        p_s[...] = p
        plgpu.commit_smem()

        def multiply(fresh):
            plgpu.wgmma(fresh, p_s, v_tile)
            return fresh[...]

        return acc + pl.run_scoped(multiply, plgpu.ACC((QUERY_ROWS, head_dim)))

    def loop(k_s, v_s, k_barrier, v_barrier, p_s):
        buffers = (k_s, v_s, k_barrier, v_barrier)
        for slot in range(steps):
            pl.when(slot < keys.num_tiles)(functools.partial(fetch, slot, slot, *buffers))

        def step(tile, carry):
            acc, old_max, total = carry
            slot = lax.rem(tile, steps)
            first_of_tile = (keys.first_tile + tile) * TILE_KEYS
            plgpu.barrier_wait(k_barrier.at[slot])
            z = scores_of(k_s.at[slot], first_of_tile)
            new_max = jnp.maximum(old_max, z.max(axis=1))
            shrink = jnp.exp2(old_max - new_max)
            p = jnp.exp2(z - lax.broadcast_in_dim(new_max, z.shape, [0]))
            total = total * shrink + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            plgpu.barrier_wait(v_barrier.at[slot])
            zero_unseen(v_s.at[slot], first_of_tile)
            acc = add_values(acc, p.astype(dtype), v_s.at[slot], p_s)

            @pl.when(tile + steps < keys.num_tiles)
            def _():
                plgpu.commit_smem()  # all four warps are done with the slot, their writes to it included
                fetch(tile + steps, slot, *buffers)

            return acc, new_max, total

        acc = plgpu.layout_cast(jnp.full((QUERY_ROWS, head_dim), 0, jnp.float32), wgmma)
        row_max, row_sum = (
            plgpu.layout_cast(jnp.full((QUERY_ROWS,), value, jnp.float32), by_row)
            for value in (first_max, first_sum)
        )
        return lax.fori_loop(0, keys.num_tiles, step, (acc, row_max, row_sum))

    return pl.run_scoped(
        loop,
        k_s=plgpu.SMEM((steps, TILE_KEYS, head_dim), dtype),
        v_s=plgpu.SMEM((steps, TILE_KEYS, head_dim), dtype),
        k_barrier=plgpu.Barrier(num_arrivals=pieces, num_barriers=steps),
        v_barrier=plgpu.Barrier(num_arrivals=pieces, num_barriers=steps),
        p_s=plgpu.SMEM((QUERY_ROWS, TILE_KEYS), dtype) if is_interpreted else None,
    )


def _scale(z, head_dim: int, soft_cap: float | None):
    """Raw products to scores in base 2."""
    scale = head_dim**-0.5
    if soft_cap is None:
        return z * (scale * LOG2_E)
    # tanh(x) = 1 - 2 / (1 + exp(2x)): the hardware's own tanh is off by 0.0005, times the cap.
    return soft_cap * LOG2_E * (1.0 - 2.0 / (1.0 + jnp.exp2(z * (2.0 * LOG2_E * scale / soft_cap))))
