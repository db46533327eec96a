"""The named cases that test, ahead-of-time build and autotune share: tiny ones, the extremes, and shapes of real models."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.grouped_matmul.kernel import grouped_matmul_tiles
from pallas_kernels.grouped_matmul.tiles import TileConfig, max_tiles, suggest_tile

NORMAL = TileConfig(64, 64, 64, 2)
SWAPPED = TileConfig(16, 64, 64, 2, swap=True)


@dataclass(frozen=True)
class Case:
    """One call: group sizes in order, padding rows after them, K, and the result's columns."""

    name: str
    group_sizes: tuple[int, ...]
    tile: TileConfig = NORMAL
    gate: str | None = None
    num_padding: int = 0
    k: int = 128
    outputs: int = 64

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes) + self.num_padding


CASES: tuple[Case, ...] = (
    Case("one row", (0, 1, 0, 0)),
    Case("one row, swapped", (0, 1, 0, 0), SWAPPED),
    Case("one hot expert", (0, 0, 130, 0)),
    Case("one hot expert, swapped", (0, 0, 37, 0), SWAPPED, "silu"),
    Case("even", (64, 64), gate="silu"),
    Case("even, swapped", (16, 16, 16), SWAPPED),
    Case("one-row groups, swapped", (1,) * 4, TileConfig(8, 64, 64, 2, swap=True), "silu"),
    Case("empty experts and padding", (3, 0, 9, 1), gate="silu", num_padding=11),
    Case("empty experts and padding, swapped", (3, 0, 9, 1), SWAPPED, "silu", num_padding=11),
    Case("only padding", (0, 0), SWAPPED, "silu", num_padding=5),
    Case("around a tile", (63, 65), num_padding=2),
    Case("around a tile, swapped", (15, 17, 16), SWAPPED, num_padding=2),
    Case("uneven K and outputs", (5, 0, 2), TileConfig(64, 96, 64, 3), k=192, outputs=192),
    Case("one step deep", (5, 2), TileConfig(64, 64, 128, 4), "gelu_tanh"),
    Case(
        "clamped gate, swapped", (5, 2), TileConfig(8, 128, 64, 2, swap=True), "clamped_swiglu", outputs=128
    ),
)


@dataclass(frozen=True)
class Product:
    """A grouped product of a model: how many tokens' rows meet how many experts."""

    model: str
    num_rows: int
    num_experts: int
    k: int
    outputs: int
    gate: str | None

    @property
    def name(self) -> str:
        return f"grouped_matmul/{self.model}/{self.gate or 'plain'}/rows={self.num_rows}"


def _products(model: str, num_experts: int, d: int, f: int, rows: tuple[int, ...]) -> tuple[Product, ...]:
    return tuple(
        product
        for num_rows in rows
        for product in (
            Product(model, num_rows, num_experts, d, f, "silu"),
            Product(model, num_rows, num_experts, f, d, None),
        )
    )


# Rows are tokens times the experts that each picks: decode at batch 1, 16 and 256, prefill of 4096 tokens.
PRODUCTS: tuple[Product, ...] = (
    *_products("qwen3-30b-a3b", 128, 2048, 768, (8, 8 * 16, 8 * 256, 8 * 4096)),
    *_products("mixtral-8x7b", 8, 4096, 14336, (2, 2 * 16, 2 * 4096)),
    *_products("deepseek-v3", 256, 7168, 2048, (8, 8 * 256, 8 * 4096)),
    Product("gpt-oss-20b", 4 * 64, 32, 2880, 2880, "clamped_swiglu"),
)


def aot_case(product: Product, tile: TileConfig | None = None, suffix: str = "") -> AotCase:
    """The kernel alone at a product's shape, with the tile that is suggested for it unless one is given."""
    is_gated = product.gate is not None
    sizes = (product.num_rows, product.num_experts, product.k, product.outputs)
    tile = tile or suggest_tile(*sizes, is_gated=is_gated)
    tiles = max_tiles(product.num_rows, product.num_experts, tile.rows)
    weight_rows = product.outputs * (2 if is_gated else 1)
    return AotCase(
        product.name + suffix,
        functools.partial(grouped_matmul_tiles, tile=tile, gate=product.gate),
        (
            jax.ShapeDtypeStruct((tiles * tile.rows, product.k), jnp.bfloat16),
            jax.ShapeDtypeStruct((product.num_experts, weight_rows, product.k), jnp.bfloat16),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
        ),
    )


AOT_CASES: tuple[AotCase, ...] = tuple(aot_case(product) for product in PRODUCTS)
