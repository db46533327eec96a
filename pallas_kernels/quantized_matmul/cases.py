"""The named cases that test, ahead-of-time build and benchmark share: tiny ones, the extremes, and shapes of real models."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.grouped_matmul.cases import Product
from pallas_kernels.grouped_matmul.tiles import max_tiles
from pallas_kernels.quantized_matmul.kernel import block_scaled_matmul_tiles, output_scaled_matmul_tiles
from pallas_kernels.quantized_matmul.quantise import (
    BLOCK,
    E4M3,
    QuantizedRows,
    QuantizedWeights,
    quantise_blocks,
    quantise_outputs,
    quantise_rows,
)
from pallas_kernels.quantized_matmul.tiles import QuantizedTile, suggest_quantized_tile

NORMAL = QuantizedTile(64, 64, 2, swap=False)
SWAPPED = QuantizedTile(16, 64, 2)
KINDS = ("blocks", "int8", "e4m3")  # of weights: scales of blocks; int8 and e4m3 with scales of outputs


@dataclass(frozen=True)
class Case:
    """One call: group sizes in order, padding rows after them, K, and the result's columns."""

    name: str
    group_sizes: tuple[int, ...]
    kind: str = "blocks"
    tile: QuantizedTile = SWAPPED
    gate: str | None = None
    num_padding: int = 0
    k: int = 256
    outputs: int = 128

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes) + self.num_padding


CASES: tuple[Case, ...] = (
    *(Case(f"{kind}, one row", (0, 1, 0), kind) for kind in KINDS),
    *(
        Case(f"{kind}, empty experts and padding", (3, 0, 9, 1), kind, num_padding=5, gate="silu")
        for kind in KINDS
    ),
    *(Case(f"{kind}, one hot expert", (0, 0, 37, 0), kind) for kind in KINDS),
    *(Case(f"{kind}, only padding", (0, 0), kind, num_padding=3) for kind in KINDS),
    *(Case(f"{kind}, one-row groups", (1,) * 4, kind, QuantizedTile(8, 64, 3)) for kind in KINDS),
    Case("blocks, around a tile, rows first", (63, 65), tile=NORMAL, num_padding=2),
    Case("blocks, gated, rows first", (5, 0, 2), tile=NORMAL, gate="silu"),
    Case("blocks, whole blocks of outputs", (5, 2), tile=QuantizedTile(16, 128, 2), outputs=256),
    Case(
        "int8, whole blocks of outputs", (5, 2), "int8", QuantizedTile(32, 128, 2), outputs=256, gate="silu"
    ),
    Case("int8, one step deep", (5, 2), "int8", k=128),
)

# Rows are tokens times the experts that each picks.
PRODUCTS: tuple[Product, ...] = (
    Product("deepseek-v3", 8 * 64, 256, 7168, 2048, "silu"),
    Product("deepseek-v3", 8 * 64, 256, 2048, 7168, None),
    Product("deepseek-v3", 8 * 4096, 256, 7168, 2048, "silu"),
    Product("deepseek-v3", 8 * 4096, 256, 2048, 7168, None),
    Product("qwen3-30b-a3b", 8 * 64, 128, 2048, 768, "silu"),
    Product("qwen3-30b-a3b", 8 * 4096, 128, 768, 2048, None),
)


def aot_case(product: Product, kind: str, tile: QuantizedTile | None = None, suffix: str = "") -> AotCase:
    """The kernel alone at a product's shape, with the tile that is suggested for it unless one is given."""
    has_blocks = kind == "blocks"
    tile = tile or suggest_quantized_tile(
        product.num_rows,
        product.num_experts,
        "blocks" if has_blocks else "outputs",
        is_gated=product.gate is not None,
    )
    num_tiles = max_tiles(product.num_rows, product.num_experts, tile.rows)
    e, o, k = product.num_experts, product.outputs * (1 if product.gate is None else 2), product.k
    rows = num_tiles * tile.rows
    run = block_scaled_matmul_tiles if has_blocks else output_scaled_matmul_tiles
    dtype = jnp.int8 if kind == "int8" else E4M3
    scales = (e, o // BLOCK, k // BLOCK) if has_blocks else (e, o)
    x = (
        QuantizedRows(_abstract((rows, k), E4M3), _abstract((k // BLOCK, rows), jnp.float32))
        if has_blocks
        else _abstract((rows, k), jnp.bfloat16)
    )
    w = QuantizedWeights(_abstract((e, o, k), dtype), _abstract(scales, jnp.float32))
    where = (_abstract((1,), jnp.int32), _abstract((num_tiles,), jnp.int32))
    name = product.name.replace("grouped_matmul/", f"quantized_matmul/{kind}/") + suffix
    args: Any = (x, w, *where)  # trees, which the tool takes as well
    return AotCase(name, functools.partial(run, tile=tile, gate=product.gate), args)


def _abstract(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


AOT_CASES: tuple[AotCase, ...] = (
    *(aot_case(product, "blocks") for product in PRODUCTS[:4]),
    *(aot_case(product, kind) for product in PRODUCTS[4:] for kind in ("int8", "e4m3")),
)


def make_floats(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x, w, group sizes) before anything is quantised; w gives unit variance out."""
    rng = np.random.default_rng(seed)
    columns = case.outputs * (1 if case.gate is None else 2)
    x = rng.standard_normal((case.num_rows, case.k), dtype=np.float32)
    w = rng.standard_normal((len(case.group_sizes), columns, case.k), dtype=np.float32) * case.k**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), jnp.array(case.group_sizes, jnp.int32)


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array | QuantizedRows, QuantizedWeights, jax.Array]:
    x, w, sizes = make_floats(case, seed)
    if case.kind == "blocks":
        return quantise_rows(x), quantise_blocks(w), sizes
    return x, quantise_outputs(w, jnp.int8 if case.kind == "int8" else E4M3), sizes
