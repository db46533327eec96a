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
MAX_SHARED_BYTES = 227 * 1024  # of one block on Hopper
ZEROED_CHANNELS = (
    64  # of values that pass through registers at a time: all 256 at once, beside the sums, would spill
)
BARRIER_BYTES = 1024  # room for barriers and alignment


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


def check_steps(steps: int, head_dim: int) -> None:
    """Raises ValueError where so many tiles of bfloat16 keys and values, beside the queries, are more than a block has."""
    needed = 2 * head_dim * (2 * TILE_KEYS * steps + QUERY_ROWS) + BARRIER_BYTES
    if steps < 1 or needed > MAX_SHARED_BYTES:
        raise ValueError(
            f"{steps} steps of {TILE_KEYS} keys of {head_dim} need {needed} bytes of shared memory, "
            f"a block has {MAX_SHARED_BYTES}; at least 1 step"
        )


@dataclass(frozen=True)
class KeyRange:
    """Tiles that one block of a kernel visits, and which keys in them are real. All traced int32 scalars."""

    row: Any  # of the page table
    kv_head: Any
    first_tile: Any
    num_tiles: Any  # may be 0
    first_key: Any  # keys before it are seen by no query of the block, and may be NaN
    end_key: Any  # as are those from here on

    def holds(self, position):
        return (position >= self.first_key) & (position < self.end_key)


@dataclass(frozen=True)
class TileBuffers:
    """Shared memory of the loop: `steps` tiles of keys and of values, [steps, 64, Dh], a barrier for each.

    p: for the probabilities [64, 64], in the interpreter only, which takes no left operand from registers.
    """

    k: Any
    v: Any
    k_barrier: Any
    v_barrier: Any
    p: Any | None


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

    may_see: positions of a tile's keys [64, 64] to which query rows see which. Rows that see keys outside the range of
        `keys` come back as garbage, which may be NaN.
    steps: tiles in flight. first_max, first_sum: what the softmax begins with, for a sink.
    """
    dtype, head_dim = pages_ref.dtype, pages_ref.shape[4]

    def loop(*scratch):
        buffers = TileBuffers(*scratch)

        def fetch(tile):
            _fetch(pages_ref, table_ref, keys, buffers, tile, lax.rem(tile, steps))

        def step(tile, carry):
            acc, old_max, total = carry
            slot = lax.rem(tile, steps)
            first_of_tile = (keys.first_tile + tile) * TILE_KEYS
            plgpu.barrier_wait(buffers.k_barrier.at[slot])
            z = tile_scores(q_s, buffers.k.at[slot], head_dim**-0.5, soft_cap)
            position = first_of_tile + plgpu.broadcasted_iota(
                jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA
            )
            z = pinned(jnp.where(may_see(position), z, LOW_SCORE))
            new_max = pinned(jnp.maximum(old_max, z.max(axis=1)))
            shrink = pinned(jnp.exp2(old_max - new_max))
            p = jnp.exp2(z - lax.broadcast_in_dim(new_max, z.shape, [0]))
            total = pinned(total * shrink + p.sum(axis=1))
            acc = pinned(acc * lax.broadcast_in_dim(shrink, acc.shape, [0]))
            plgpu.barrier_wait(buffers.v_barrier.at[slot])
            zero_unseen(buffers.v.at[slot], first_of_tile, keys)
            acc = add_values(acc, p.astype(dtype), buffers.v.at[slot], buffers.p)

            @pl.when(tile + steps < keys.num_tiles)
            def _():
                # All four warps are done with the slot, their own writes to it included: the copy must come after.
                plgpu.commit_smem()
                fetch(tile + steps)

            return acc, new_max, total

        for tile in range(steps):
            pl.when(tile < keys.num_tiles)(functools.partial(fetch, jnp.int32(tile)))
        acc = pinned(jnp.full((QUERY_ROWS, head_dim), 0, jnp.float32))
        row_max = pinned(jnp.full((QUERY_ROWS,), first_max, jnp.float32))
        row_sum = pinned(jnp.full((QUERY_ROWS,), first_sum, jnp.float32))
        return lax.fori_loop(0, keys.num_tiles, step, (acc, row_max, row_sum))

    tiles = plgpu.SMEM((steps, TILE_KEYS, head_dim), dtype)
    copies = TILE_KEYS // min(pages_ref.shape[3], TILE_KEYS)
    barrier = plgpu.Barrier(num_arrivals=copies, num_barriers=steps)
    p_type = plgpu.SMEM((QUERY_ROWS, TILE_KEYS), dtype) if is_interpreted else None
    return pl.run_scoped(loop, tiles, tiles, barrier, barrier, p_type)


def pinned(x):
    """A matrix of scores or values, or a value for each of its rows, where wgmma has it.

    Layouts are otherwise found by a search, which takes minutes for the longer chains of operations here.
    """
    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(x, layout if x.ndim == 2 else layout.reduce(1))


def _fetch(pages_ref, table_ref, keys: KeyRange, buffers: TileBuffers, tile, slot) -> None:
    """Starts the copies of one tile of keys and of values."""
    page_size = pages_ref.shape[3]
    piece = min(page_size, TILE_KEYS)  # keys that one copy brings
    pieces, pieces_a_page = TILE_KEYS // piece, page_size // piece
    last_page = lax.div(keys.end_key - 1, page_size)
    for i in range(pieces):
        place = (keys.first_tile + tile) * pieces + i
        # The last tile may reach past the row's pages: its surplus is read from the last one and masked.
        page = table_ref[keys.row, jnp.minimum(lax.div(place, pieces_a_page), last_page)]
        rows = pl.ds(lax.rem(place, pieces_a_page) * piece, piece)
        to = pl.ds(i * piece, piece)
        for part, buffer, barrier in ((0, buffers.k, buffers.k_barrier), (1, buffers.v, buffers.v_barrier)):
            source = pages_ref.at[page, part, keys.kv_head, rows]
            plgpu.copy_gmem_to_smem(source, buffer.at[slot, to], barrier.at[slot])


def tile_scores(q_s, k_tile, scale: float, soft_cap: float | None = None):
    """Scores in base 2, [64, 64]."""

    def multiply(acc):
        plgpu.wgmma(acc, q_s, k_tile.T)
        return acc[...]

    z = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((QUERY_ROWS, TILE_KEYS)))
    if soft_cap is None:
        return pinned(z * (scale * LOG2_E))
    # tanh(x) = 1 - 2 / (1 + exp(2x)): the hardware's own tanh is off by 0.0005, times the cap.
    grown = pinned(jnp.exp2(pinned(z * (2.0 * LOG2_E * scale / soft_cap))))
    return pinned((1.0 - pinned(2.0 / pinned(1.0 + grown))) * (soft_cap * LOG2_E))


def zero_unseen(v_tile, first_of_tile, keys: KeyRange) -> None:
    """A weight of 0 times a stale NaN would still be NaN. Only a range's first and last tile hold any."""

    @pl.when((first_of_tile < keys.first_key) | (first_of_tile + TILE_KEYS > keys.end_key))
    def _():
        for first in range(0, v_tile.shape[1], ZEROED_CHANNELS):
            part = v_tile.at[:, pl.ds(first, ZEROED_CHANNELS)]
            v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(keys.holds(first_of_tile + rows), v, jnp.zeros_like(v))
        plgpu.commit_smem()


def add_values(acc, p, v_tile, p_s):
    """acc + p @ v: in place and from registers on the GPU, where `p_s` is None."""
    if p_s is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_tile))(plgpu.WGMMAAccumulatorRef.init(acc))
    p_s[...] = p
    plgpu.commit_smem()

    def multiply(fresh):
        plgpu.wgmma(fresh, p_s, v_tile)
        return fresh[...]

    return acc + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(acc.shape))
