"""Products of real models with random rows, for tuning and for the check on a chip."""

from collections.abc import Iterator
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_matmul.cases import Product
from pallas_kernels.grouped_matmul.kernel import grouped_matmul_tiles
from pallas_kernels.grouped_matmul.reference import GATES
from pallas_kernels.grouped_matmul.tiles import (
    MAX_SHARED_BYTES,
    TileConfig,
    choose_tile,
    map_tiles,
    suggest_tile,
    tile_key,
)
from pallas_kernels.interpret import InterpretParams
from pallas_kernels.workload import Fields, Prepared, Workload

NUM_SAMPLED = 96  # rows that are compared
NUM_LINKS = 4  # times that the experts are renamed
MAX_ACCUMULATORS = 64 * 256  # of one warpgroup, float32, over all products of a tile: half of its registers


def make_workload(product: Product, seed: int) -> Workload:
    """Uniform routing; weights have the scale that keeps results near 1."""
    is_gated = product.gate is not None
    num_rows, num_experts, k, outputs = product.num_rows, product.num_experts, product.k, product.outputs
    rng = np.random.default_rng(seed)
    sizes = np.bincount(rng.integers(0, num_experts, num_rows), minlength=num_experts).astype(np.int32)
    x_key, w_key = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(x_key, (num_rows, k), jnp.bfloat16)
    w_shape = (num_experts, outputs * (2 if is_gated else 1), k)
    w = _draw(w_key, w_shape, 2 * k**-0.5)
    rows = np.sort(rng.choice(num_rows, min(NUM_SAMPLED, num_rows), replace=False))
    expert_of_row = np.repeat(np.arange(num_experts), sizes)[rows]

    def prepare(fields: Fields | None, interpret: InterpretParams | None) -> Prepared:
        tile = (
            choose_tile(num_rows, num_experts, k, outputs, is_gated=is_gated)
            if fields is None
            else TileConfig(**{**fields, "swap": bool(fields["swap"])})
        )
        tile.check(k, outputs, is_gated=is_gated)
        tiles = map_tiles(jnp.asarray(sizes), num_rows, tile.rows)
        step = max(1, num_experts // NUM_LINKS)

        def function(expert, num_live, x_tiles, w):
            return grouped_matmul_tiles(
                x_tiles, w, num_live, expert, tile=tile, gate=product.gate, interpret=interpret
            )

        links = tuple((tiles.expert + i * step) % num_experts for i in range(NUM_LINKS))
        args = (tiles.num_live, x[tiles.sorted_row], w)
        return Prepared(function, links, args, tiles.aligned_row[jnp.asarray(rows)])

    def expected() -> np.ndarray:
        return np.asarray(_rows_times_experts(x[rows], w, jnp.asarray(expert_of_row), product.gate))

    element = 2  # bytes of bfloat16
    weights = int((sizes > 0).sum()) * w_shape[1] * k
    return Workload(
        name=product.name,
        op="grouped_matmul",
        key=tile_key(num_rows, num_experts, k, outputs, is_gated=is_gated),
        default=_fields(suggest_tile(num_rows, num_experts, k, outputs, is_gated=is_gated)),
        candidates=tuple(_fields(tile) for tile in _candidates(product)),
        prepare=prepare,
        expected=expected,
        num_bytes=element * (weights + num_rows * (k + outputs)),
        num_flops=2 * num_rows * w_shape[1] * k,
    )


def _fields(tile: TileConfig) -> Fields:
    return {name: int(value) for name, value in asdict(tile).items()}


def _candidates(product: Product) -> Iterator[TileConfig]:
    """Both forms where both can be useful: swapped for small groups, plain for large ones."""
    is_gated = product.gate is not None
    mean_group = product.num_rows / product.num_experts
    swapped = [(rows, 64, True) for rows in (8, 16, 32, 64, 128) if rows <= max(8, 4 * mean_group)]
    plain = [(64, outputs, False) for outputs in (64, 96, 128, 192, 256)] if mean_group > 16 else []
    for rows, outputs, swap in [*swapped, *plain]:
        for depth in (64, 128):
            for steps in (3, 4, 6):
                tile = TileConfig(rows, outputs, depth, steps, swap)
                accumulators = rows * outputs * (2 if is_gated else 1)
                if accumulators <= MAX_ACCUMULATORS and _fits(tile, product, is_gated=is_gated):
                    yield tile


def _fits(tile: TileConfig, product: Product, *, is_gated: bool) -> bool:
    divides = product.k % tile.depth == 0 and product.outputs % tile.outputs == 0
    return divides and tile.shared_bytes(is_gated=is_gated) <= MAX_SHARED_BYTES


def _draw(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    draw = jax.jit(lambda key: (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(jnp.bfloat16))
    return draw(key)


@jax.jit
def _multiply(x_row: jax.Array, w_expert: jax.Array) -> jax.Array:
    return jnp.sum(w_expert.astype(jnp.float32) * x_row.astype(jnp.float32)[None, :], axis=1)


def _rows_times_experts(x: jax.Array, w: jax.Array, expert: jax.Array, gate: str | None) -> jax.Array:
    """One row after another, in float32 without a matrix unit."""

    def one(pair):
        product = _multiply(pair[0], w[pair[1]])
        return product if gate is None else GATES[gate](*jnp.split(product, 2))

    return lax.map(one, (x, expert))
