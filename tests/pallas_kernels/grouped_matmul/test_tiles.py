"""Tile sizes and the map from tiles to experts: every row once, and by its own expert."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.cases import PRODUCTS, Product
from pallas_kernels.grouped_matmul.tiles import (
    MAX_SHARED_BYTES,
    TileConfig,
    choose_tile,
    map_tiles,
    max_tiles,
    suggest_tile,
    tile_key,
)
from pallas_kernels.tuning import TileTables

NUM_ROWS, NUM_EXPERTS = 40, 5
mapped = jax.jit(functools.partial(map_tiles, num_rows=NUM_ROWS), static_argnames="rows")


def test_the_example_of_the_docstring() -> None:
    tiles = map_tiles(jnp.array([3, 5, 0, 1], jnp.int32), num_rows=9, rows=4)
    assert int(tiles.num_live[0]) == 4
    assert tiles.expert[:4].tolist() == [0, 1, 1, 3]
    assert tiles.expert.shape == (6,)
    assert tiles.aligned_row.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 12]
    assert tiles.sorted_row[:13].tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 8, 8]


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, NUM_ROWS), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
    rows=st.sampled_from([1, 8, 64]),
)
def test_every_row_meets_its_expert_once(cuts: list[int], rows: int) -> None:
    ends = np.sort(cuts)  # rows past the last are padding
    sizes = np.diff(ends, prepend=0)
    tiles = jax.tree.map(np.asarray, mapped(jnp.asarray(sizes, jnp.int32), rows=rows))
    expert_of_row = np.repeat(np.arange(NUM_EXPERTS), sizes)
    num_real = len(expert_of_row)
    assert tiles.is_row.tolist() == [True] * num_real + [False] * (NUM_ROWS - num_real)
    place = tiles.aligned_row[:num_real]
    assert len(set(place.tolist())) == num_real
    assert (tiles.sorted_row[place] == np.arange(num_real)).all()
    assert (tiles.expert[place // rows] == expert_of_row).all()
    assert (place // rows < tiles.num_live[0]).all()
    assert int(tiles.num_live[0]) == sum(-(-sizes // rows)) <= max_tiles(NUM_ROWS, NUM_EXPERTS, rows)
    assert ((tiles.sorted_row >= 0) & (tiles.sorted_row < NUM_ROWS)).all()


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
def test_the_suggestion_fits_real_models(product: Product) -> None:
    is_gated = product.gate is not None
    tile = suggest_tile(product.num_rows, product.num_experts, product.k, product.outputs, is_gated=is_gated)
    tile.check(product.k, product.outputs, is_gated=is_gated)
    assert tile.shared_bytes(is_gated=is_gated) <= MAX_SHARED_BYTES
    assert tile.swap == (product.num_rows / product.num_experts <= 32)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 300, 4096, 100_000])
@pytest.mark.parametrize("num_experts", [1, 8, 128])
def test_both_products_of_an_mlp_share_their_rows(num_rows: int, num_experts: int) -> None:
    gated = suggest_tile(num_rows, num_experts, 2048, 768, is_gated=True)
    plain = suggest_tile(num_rows, num_experts, 768, 2048, is_gated=False)
    assert (gated.rows, gated.swap) == (plain.rows, plain.swap)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (TileConfig(32, 64), "got 32"),
        (TileConfig(64, 260), "got 260"),
        (TileConfig(64, 32, swap=True), "got 32"),
        (TileConfig(12, 64, swap=True), "got 12"),
        (TileConfig(64, 64, depth=32), "got 32"),
        (TileConfig(64, 64, steps=1), "got 1"),
        (TileConfig(256, 256, depth=128), "525312 bytes of shared memory, a block has 232448"),
    ],
)
def test_what_is_no_tile_is_refused(tile: TileConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile.check(256, 256, is_gated=False)


def test_a_tile_that_does_not_divide_cannot_run() -> None:
    with pytest.raises(NotImplementedError, match="contraction 100 is no multiple of the tile's depth 64"):
        TileConfig(64, 64).check(100, 64, is_gated=False)
    with pytest.raises(NotImplementedError, match="96 outputs are no multiple of the tile's 64"):
        TileConfig(64, 64).check(64, 96, is_gated=False)


def test_the_table_of_the_device_comes_first(tmp_path: Path) -> None:
    tables = TileTables(tmp_path, "nvidia_h200")
    key = tile_key(100, 8, 256, 128, is_gated=True)
    assert key == tile_key(128, 8, 256, 128, is_gated=True)
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    entry = '{"rows": 64, "outputs": 128, "depth": 64, "steps": 3, "swap": false}'
    (folder / "grouped_matmul.json").write_text(f'{{"tiles": {{"{key}": {entry}}}}}')
    assert choose_tile(100, 8, 256, 128, is_gated=True, tables=tables) == TileConfig(64, 128, 64, 3)
    assert tables.misses() == {}
    suggested = choose_tile(100, 8, 256, 64, is_gated=True, tables=tables)
    assert suggested == suggest_tile(100, 8, 256, 64, is_gated=True)
    assert tables.misses() == {("grouped_matmul", tile_key(100, 8, 256, 64, is_gated=True)): 1}
