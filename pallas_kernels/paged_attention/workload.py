"""Decode attention of real models over random pages, for tuning and for the check on a chip."""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.paged_attention.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.paged_attention.kernel import (
    DecodeTiles,
    choose_decode_tiles,
    decode_key,
    paged_attention_mosaic,
    suggest_decode_tiles,
)
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tiles import check_steps
from pallas_kernels.workload import Fields, Prepared, Workload

NUM_COMPARED = 4  # rows; the reference keeps all their keys in float32, once for each head
NUM_LINKS = 4  # times that the pages are dealt out anew


@dataclass(frozen=True)
class Decode:
    """num_rows rows of up to kv_len keys each; half of the rows are full, the others anything from 1."""

    model: ModelShape
    num_rows: int
    kv_len: int
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"paged_attention/{self.model.name}/rows={self.num_rows}/keys={self.kv_len}"


DECODES: tuple[Decode, ...] = (
    Decode(MODEL_SHAPES[0], 64, 4096),
    Decode(MODEL_SHAPES[0], 1, 4096),
    Decode(MODEL_SHAPES[0], 16, 4096),
    Decode(MODEL_SHAPES[0], 256, 2048),
    Decode(MODEL_SHAPES[1], 64, 4096),
    Decode(MODEL_SHAPES[2], 64, 4096),
    Decode(MODEL_SHAPES[3], 16, 4096),
)


def make_workload(decode: Decode, seed: int) -> Workload:
    """The dummy page 0 holds NaN."""
    model, num_rows, page_size = decode.model, decode.num_rows, decode.page_size
    rng = np.random.default_rng(seed)
    pages_a_row = -(-decode.kv_len // page_size)
    num_pages = num_rows * pages_a_row
    lengths = np.full(num_rows, decode.kv_len, np.int32)
    lengths[1::2] = rng.integers(1, decode.kv_len + 1, len(lengths[1::2]))
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages + 1, 2, model.num_kv_heads, page_size, model.head_dim)
    pages = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).at[0].set(jnp.nan))(keys[0])
    q = jax.random.normal(keys[1], (num_rows, model.num_heads, model.head_dim), jnp.float32)
    sinks = jax.random.normal(keys[2], (model.num_heads,)) if model.has_sinks else None
    kv_len = jnp.asarray(lengths)
    dealt = [rng.permutation(num_pages).reshape(num_rows, pages_a_row) + 1 for _ in range(NUM_LINKS)]
    options = {"window": model.window, "sinks": sinks, "soft_cap": model.soft_cap}
    sizes = (num_rows, model.num_kv_heads, pages_a_row * page_size, model.head_dim)

    def prepare(fields: Fields | None, interpret: InterpretParams | None) -> Prepared:
        tiles = choose_decode_tiles(*sizes) if fields is None else DecodeTiles(**fields)
        check_steps(tiles.steps, model.head_dim)

        def function(table, q, pages, kv_len):
            return paged_attention_mosaic(
                q, pages, table, kv_len, tiles=tiles, interpret=interpret, **options
            )

        links = tuple(jnp.asarray(table, jnp.int32) for table in dealt)
        return Prepared(function, links, (q, pages, kv_len), jnp.arange(min(NUM_COMPARED, num_rows)))

    def expected() -> np.ndarray:
        few = slice(0, NUM_COMPARED)
        table = jnp.asarray(dealt[0], jnp.int32)[few]
        with jax.default_matmul_precision("highest"):
            return np.asarray(
                jax.jit(lambda *a: paged_attention_reference(*a, **options))(
                    q[few], pages, table, kv_len[few]
                )
            )

    seen = int(np.minimum(lengths, model.window or decode.kv_len).sum())
    return Workload(
        name=decode.name,
        op="paged_attention",
        key=decode_key(*sizes),
        default=_fields(suggest_decode_tiles(*sizes)),
        candidates=tuple(
            {"splits": splits, "steps": steps}
            for splits in (1, 2, 4, 8, 16, 32)
            for steps in (2, 3, 4)
            if _fits(splits, steps, model.head_dim, decode.kv_len)
        ),
        prepare=prepare,
        expected=expected,
        num_bytes=seen * 2 * model.num_kv_heads * model.head_dim * 2,
        num_flops=seen * 4 * model.num_heads * model.head_dim,
    )


def _fields(tiles: DecodeTiles) -> Fields:
    return asdict(tiles)


def _fits(splits: int, steps: int, head_dim: int, kv_len: int) -> bool:
    try:
        check_steps(steps, head_dim)
    except ValueError:
        return False
    return splits * 64 <= max(64, kv_len)
