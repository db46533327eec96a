"""Absorbed latent attention on Hopper: a tile of 64 latents is the keys of all heads, and its first part their values.

    tile [64 keys, 512 latent + 64 rotary] in shared memory, once
        scores  =  q [64 heads, 576] @ tile.T
        sums   +=  p [64 heads, 64]  @ tile[:, part of the latent]      float32, in registers

Sums of all 512 values would take every register of a warpgroup, so a block has 256 of them and two blocks share the heads:
both read the tiles (the second from the cache, as a rule) and both compute the scores. Two warpgroups in one block would not
have to; that is not built. The keys of a row are cut into splits as in `paged_attention`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.paged_attention.kernel import (
    DecodeTiles,
    choose_decode_tiles,
    combine_splits,
    keys_of_split,
)
from pallas_kernels.paged_attention.tiles import (
    BARRIER_BYTES,
    LOW_SCORE,
    MAX_SHARED_BYTES,
    QUERY_ROWS,
    TILE_KEYS,
    KeyRange,
    add_values,
    pinned,
    tile_scores,
    zero_unseen,
)

MAX_VALUES = 256  # of the latent, in the sums of one block


def unfit_for_mosaic(pages: Array | jax.ShapeDtypeStruct, num_latent: int) -> str | None:
    """Why the kernel cannot take these operands, or None. Any number of rows and heads will do."""
    _, page_size, width = pages.shape
    if pages.dtype != jnp.bfloat16:
        return f"takes pages of bfloat16, got {pages.dtype}"
    if page_size not in (16, 32) and page_size % TILE_KEYS:
        return f"takes pages of 16, 32 or a multiple of {TILE_KEYS} tokens, got {page_size}"
    if num_latent not in (64, 128, 256, 512) or (width - num_latent) % 64:
        return f"takes 64, 128, 256 or 512 latent and a multiple of 64 other channels, got {num_latent} of {width}"
    if 2 * width * (QUERY_ROWS + TILE_KEYS) + BARRIER_BYTES > MAX_SHARED_BYTES:
        return f"takes keys whose tile fits into shared memory, got {width} channels"
    return None


def mla_attention_mosaic(
    q: Float[Array, "B H CR"],
    pages: Float[Array, "N S CR"],
    page_table: Int[Array, "B P"],
    kv_len: Int[Array, " B"],
    *,
    num_latent: int,
    scale: float,
    tiles: DecodeTiles | None = None,
    interpret: InterpretParams | None = None,
) -> Float[Array, "B H C"]:
    """The op. Raises NotImplementedError for operands that the kernel does not take, ValueError for tiles too large."""
    reason = unfit_for_mosaic(pages, num_latent)
    if reason is not None:
        raise NotImplementedError(f"mosaic: {reason}")
    num_rows, num_heads, width = q.shape
    if tiles is None:
        num_blocks = -(-num_heads // QUERY_ROWS) * max(1, num_latent // MAX_VALUES)
        found = choose_decode_tiles(num_rows, num_blocks, page_table.shape[1] * pages.shape[1], width)
        tiles = DecodeTiles(found.splits, min(found.steps, _most_steps(width)))
    if tiles.steps > _most_steps(width):
        raise ValueError(
            f"{tiles}: at most {_most_steps(width)} steps of {width} channels fit into shared memory"
        )
    return _decode(
        q, pages, page_table.astype(jnp.int32), kv_len.astype(jnp.int32), num_latent, scale, tiles, interpret
    )


def _most_steps(width: int) -> int:
    return (MAX_SHARED_BYTES - BARRIER_BYTES) // (2 * width * TILE_KEYS) - 1  # one for the queries


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))  # one compilation for all layers
def _decode(
    q: Array,
    pages: Array,
    page_table: Array,
    kv_len: Array,
    num_latent: int,
    scale: float,
    tiles: DecodeTiles,
    interpret: InterpretParams | None,
) -> Array:
    num_rows, num_heads, width = q.shape
    num_head_blocks, values = -(-num_heads // QUERY_ROWS), min(num_latent, MAX_VALUES)
    padded = jnp.pad(q.astype(pages.dtype), ((0, 0), (0, num_head_blocks * QUERY_ROWS - num_heads), (0, 0)))

    def body(
        q_ref,  # [B, blocks * 64, CR]
        pages_ref,  # [N, S, CR]
        table_ref,  # [B, P]
        kv_len_ref,  # [B]
        out_ref,  # [splits, B, blocks * 64, C]
        max_ref,  # [splits, parts, B, blocks * 64], the same for all parts of the latent
        sum_ref,  # [splits, parts, B, blocks * 64]
    ):
        row, head_block, split = (lax.axis_index(name) for name in ("row", "head_block", "split"))
        heads = pl.ds(head_block * QUERY_ROWS, QUERY_ROWS)
        keys = keys_of_split(kv_len_ref[row], row, 0, split, tiles.splits, None)

        part = lax.axis_index("part")
        columns = pl.ds(part * values, values)

        def attend(q_s, barrier):
            plgpu.copy_gmem_to_smem(q_ref.at[row, heads], q_s, barrier)
            plgpu.barrier_wait(barrier)
            return _attend(pages_ref, table_ref, q_s, keys, columns, scale, tiles.steps, interpret)

        results = pl.run_scoped(attend, plgpu.SMEM((QUERY_ROWS, width), pages.dtype), plgpu.Barrier())

        # Here and not above, so that it takes the place of the tiles.
        @functools.partial(
            pl.run_scoped,
            out_s=plgpu.SMEM((QUERY_ROWS, values), jnp.float32),
            max_s=plgpu.SMEM((QUERY_ROWS,), jnp.float32),
            sum_s=plgpu.SMEM((QUERY_ROWS,), jnp.float32),
        )
        def _(out_s, max_s, sum_s):
            out_s[...], max_s[...], sum_s[...] = results
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out_ref.at[split, row, heads, columns])
            plgpu.copy_smem_to_gmem(max_s, max_ref.at[split, part, row, heads])
            plgpu.copy_smem_to_gmem(sum_s, sum_ref.at[split, part, row, heads])
            plgpu.wait_smem_to_gmem(0)

    heads = (num_rows, num_head_blocks * QUERY_ROWS)
    per_head = jax.ShapeDtypeStruct((tiles.splits, num_latent // values, *heads), jnp.float32)
    call: Callable[..., tuple[Array, Array, Array]] = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tiles.splits, *heads, num_latent), jnp.float32),
            per_head,
            per_head,
        ),
        grid=(num_latent // values, num_rows, num_head_blocks, tiles.splits),
        grid_names=("part", "row", "head_block", "split"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
        kernel_name="mla_attention",
    )
    out, row_max, row_sum = call(padded, pages, page_table, kv_len)
    # One kv head: [splits, B, 1, H, ...]
    row_max, row_sum = (a[:, 0, :, None, :num_heads] for a in (row_max, row_sum))
    return combine_splits(out[:, :, None, :num_heads], row_max, row_sum, None)[:, 0].astype(q.dtype)


def _attend(
    pages_ref,
    table_ref,
    q_s,
    keys: KeyRange,
    columns,
    scale: float,
    steps: int,
    interpret: InterpretParams | None,
):
    """Unnormalised (sum of p * v [64, values], maximum [64], sum of p [64]); scores are in base 2."""
    dtype, values = q_s.dtype, columns.size

    def loop(tiles_s, barrier, p_s=None):
        def fetch(tile):
            _fetch(pages_ref, table_ref, keys, tiles_s, barrier, tile, lax.rem(tile, steps))

        def step(tile, carry):
            acc, old_max, total = carry
            slot = lax.rem(tile, steps)
            first_of_tile = (keys.first_tile + tile) * TILE_KEYS
            plgpu.barrier_wait(barrier.at[slot])
            z = tile_scores(q_s, tiles_s.at[slot], scale)
            position = first_of_tile + plgpu.broadcasted_iota(
                jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA
            )
            z = pinned(jnp.where(keys.holds(position), z, LOW_SCORE))
            new_max = pinned(jnp.maximum(old_max, z.max(axis=1)))
            shrink = pinned(jnp.exp2(old_max - new_max))
            p = jnp.exp2(z - lax.broadcast_in_dim(new_max, z.shape, [0]))
            total = pinned(total * shrink + p.sum(axis=1))
            acc = pinned(acc * lax.broadcast_in_dim(shrink, acc.shape, [0]))
            v_tile = tiles_s.at[slot, :, columns]
            zero_unseen(v_tile, first_of_tile, keys)
            acc = add_values(acc, p.astype(dtype), v_tile, p_s)

            @pl.when(tile + steps < keys.num_tiles)
            def _():
                # All four warps are done with the slot, their own writes to it included: the copy must come after.
                plgpu.commit_smem()
                fetch(tile + steps)

            return acc, new_max, total

        for tile in range(steps):
            pl.when(tile < keys.num_tiles)(functools.partial(fetch, jnp.int32(tile)))
        acc = pinned(jnp.full((QUERY_ROWS, values), 0, jnp.float32))
        row_max = pinned(jnp.full((QUERY_ROWS,), LOW_SCORE, jnp.float32))
        row_sum = pinned(jnp.full((QUERY_ROWS,), 0, jnp.float32))
        return lax.fori_loop(0, keys.num_tiles, step, (acc, row_max, row_sum))

    copies = TILE_KEYS // min(pages_ref.shape[1], TILE_KEYS)
    scratch = [
        plgpu.SMEM((steps, TILE_KEYS, q_s.shape[1]), dtype),
        plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
    ]
    if interpret is not None:
        scratch.append(plgpu.SMEM((QUERY_ROWS, TILE_KEYS), dtype))
    return pl.run_scoped(loop, *scratch)


def _fetch(pages_ref, table_ref, keys: KeyRange, tiles_s, barrier, tile, slot) -> None:
    """Starts the copies of one tile, which lies in one page or in several."""
    page_size = pages_ref.shape[1]
    piece = min(page_size, TILE_KEYS)
    pieces, pieces_a_page = TILE_KEYS // piece, page_size // piece
    last_page = lax.div(keys.end_key - 1, page_size)
    for i in range(pieces):
        place = (keys.first_tile + tile) * pieces + i
        # The last tile may reach past the row's pages: its surplus is read from the last one and masked.
        page = table_ref[keys.row, jnp.minimum(lax.div(place, pieces_a_page), last_page)]
        rows = pl.ds(lax.rem(place, pieces_a_page) * piece, piece)
        plgpu.copy_gmem_to_smem(
            pages_ref.at[page, rows], tiles_s.at[slot, pl.ds(i * piece, piece)], barrier.at[slot]
        )
