"""Prefill attention of real models over random pages, for the check on a chip."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.paged_attention.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.prefill_attention.kernel import prefill_attention_mosaic
from pallas_kernels.workload import Fields, Prepared, Workload

NUM_COMPARED = 8  # tokens; the reference keeps all their keys in float32, once for each head
NUM_LINKS = 4  # times that the pages are dealt out anew


@dataclass(frozen=True)
class Prefill:
    """A chunk of num_tokens of one prompt after context_len tokens that are in the pages; whole pages both."""

    model: ModelShape
    num_tokens: int
    context_len: int = 0
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"prefill_attention/{self.model.name}/tokens={self.num_tokens}/context={self.context_len}"


PREFILLS: tuple[Prefill, ...] = (
    Prefill(MODEL_SHAPES[0], 4096),
    Prefill(MODEL_SHAPES[0], 2048, 8192),
    Prefill(MODEL_SHAPES[2], 4096),
)


def make_workload(prefill: Prefill, seed: int) -> Workload:
    """The dummy page 0 holds NaN. Counts are of what causal attention needs, half a square."""
    model, page_size, num_tokens = prefill.model, prefill.page_size, prefill.num_tokens
    rng = np.random.default_rng(seed)
    num_pages = (num_tokens + prefill.context_len) // page_size
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages + 1, 2, model.num_kv_heads, page_size, model.head_dim)
    pages = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).at[0].set(jnp.nan))(keys[0])
    q = jax.random.normal(keys[1], (num_tokens, model.num_heads, model.head_dim), jnp.float32)
    sinks = jax.random.normal(keys[2], (model.num_heads,)) if model.has_sinks else None
    dealt = [rng.permutation(num_pages)[None] + 1 for _ in range(NUM_LINKS)]
    compared = np.sort(rng.choice(num_tokens, min(NUM_COMPARED, num_tokens), replace=False))
    options = {"window": model.window, "sinks": sinks, "soft_cap": model.soft_cap}
    row = tuple(jnp.array([value], jnp.int32) for value in (0, num_tokens, prefill.context_len))

    def prepare(fields: Fields | None, interpret: InterpretParams | None) -> Prepared:
        def function(table, q, pages, row_start, row_len, context_len):
            return prefill_attention_mosaic(
                q,
                pages,
                table,
                row_start,
                row_len,
                context_len,
                interpret=interpret,
                **(fields or {}),
                **options,
            )

        links = tuple(jnp.asarray(table, jnp.int32) for table in dealt)
        return Prepared(function, links, (q, pages, *row), jnp.asarray(compared))

    def expected() -> np.ndarray:
        """Each token as a row that decodes."""
        table = jnp.repeat(jnp.asarray(dealt[0], jnp.int32), len(compared), axis=0)
        kv_len = jnp.asarray(prefill.context_len + compared + 1, jnp.int32)
        with jax.default_matmul_precision("highest"):
            reference = jax.jit(lambda *a: paged_attention_reference(*a, **options))
            return np.asarray(reference(q[compared], pages, table, kv_len))

    seen = np.arange(prefill.context_len + 1, prefill.context_len + num_tokens + 1)
    seen = int(np.minimum(seen, model.window or seen[-1]).sum())
    values = 2 * num_tokens * model.num_heads * model.head_dim  # queries and results
    return Workload(
        name=prefill.name,
        op="prefill_attention",
        key="",
        default={},
        candidates=({"steps": 2},),
        prepare=prepare,
        expected=expected,
        num_bytes=2 * (values + 2 * num_pages * page_size * model.num_kv_heads * model.head_dim),
        num_flops=seen * 4 * model.num_heads * model.head_dim,
    )
