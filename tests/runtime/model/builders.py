"""Small builders for tests of the model: pack rows into batches, run them, decode greedily. No scheduler involved."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.cache.kv_pool import KVPool, make_kv_pool
from runtime.model.architecture import Architecture, load_architecture
from runtime.model.batch import DecodeBatch, PrefillBatch
from runtime.model.checkpoint import load_params
from runtime.model.params import Params
from runtime.model.sharding import ALONE, LayerSharding
from runtime.model.transformer import forward_decode, forward_prefill, unembed

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
PADDED_TOKENS = 256
PADDED_ROWS = 5
FIXTURE_NAMES = sorted(p.parent.name for p in CHECKPOINTS.glob("*/config.json"))

QWEN3_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 256, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """Tokens of one row from position `start` on; `pages` are the row's pages from position 0 on."""

    tokens: list[int]
    pages: list[int]
    start: int = 0


@dataclass
class Runner:
    """A model with its pool; each call replaces the pool, as the engine does.

    Batches are padded to a few shapes unless told otherwise, because compiling is what tests would wait for.
    """

    arch: Architecture
    params: Params
    page_size: int = 4
    num_pages: int = 80
    dtype: Any = jnp.float32
    table_width: int = 64
    sharding: LayerSharding = ALONE
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = make_kv_pool(self.arch, self.num_pages, self.page_size, self.dtype)

    @classmethod
    def load(cls, folder: Path, dtype: Any = jnp.float32, **options: Any) -> "Runner":
        arch = load_architecture(folder)
        return cls(arch, load_params(folder, arch, dtype), dtype=dtype, **options)

    def pages(self, first: int, num_tokens: int) -> list[int]:
        return list(range(first, first - (-num_tokens // self.page_size)))

    def prefill(
        self, chunks: list[Chunk], num_tokens: int | None = None, num_rows: int | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """(logits [chunk length, V] of each chunk, expert counts [L, E]); padded to num_tokens and num_rows."""
        aligned = sum(-(-len(c.tokens) // self.page_size) * self.page_size for c in chunks)
        num_tokens = num_tokens or -(-aligned // PADDED_TOKENS) * PADDED_TOKENS
        batch = pack_prefill(chunks, self.page_size, self.table_width, num_tokens, num_rows or PADDED_ROWS)
        logits, self.pool, counts = _prefill(
            self.arch, self.params, self.pool, batch, self.page_size, self.sharding
        )
        starts = np.asarray(batch.row_start)
        rows = [np.asarray(logits[s : s + len(c.tokens)]) for s, c in zip(starts, chunks, strict=False)]
        return rows, np.asarray(counts)

    def decode(
        self, chunks: list[Chunk | None], num_rows: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(logits [rows, V], expert counts); each chunk holds one token; None is a padding row."""
        batch = pack_decode(chunks, self.table_width, num_rows or PADDED_ROWS)
        logits, self.pool, counts = _decode(
            self.arch, self.params, self.pool, batch, self.page_size, self.sharding
        )
        return np.asarray(logits), np.asarray(counts)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continuations of all prompts, prefilled and decoded together."""
        pages, first = [], 1
        for prompt in prompts:
            pages.append(self.pages(first, len(prompt) + num_tokens))
            first += len(pages[-1])
        logits, _ = self.prefill([Chunk(p, g) for p, g in zip(prompts, pages, strict=True)])
        texts = [[int(row[-1].argmax())] for row in logits]
        for _ in range(num_tokens - 1):
            steps = zip(prompts, texts, pages, strict=True)
            out, _ = self.decode([Chunk([t[-1]], g, len(p) + len(t) - 1) for p, t, g in steps])
            for text, row in zip(texts, out[: len(texts)], strict=True):
                text.append(int(row.argmax()))
        return texts


def pack_prefill(
    chunks: list[Chunk],
    page_size: int,
    table_width: int,
    num_tokens: int | None = None,
    num_rows: int | None = None,
) -> PrefillBatch:
    aligned = [-(-len(c.tokens) // page_size) * page_size for c in chunks]
    num_tokens, num_rows = num_tokens or sum(aligned), num_rows or len(chunks)
    tokens = np.zeros(num_tokens, np.int32)
    row_start = np.full(num_rows, num_tokens, np.int32)
    row_len, context_len = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    page_table = np.zeros((num_rows, table_width), np.int32)
    start = 0
    for row, chunk in enumerate(chunks):
        tokens[start : start + len(chunk.tokens)] = chunk.tokens
        row_start[row], row_len[row], context_len[row] = start, len(chunk.tokens), chunk.start
        page_table[row, : len(chunk.pages)] = chunk.pages
        start += aligned[row]
    return PrefillBatch(*map(jnp.asarray, (tokens, row_start, row_len, context_len, page_table)))


def pack_decode(chunks: list[Chunk | None], table_width: int, num_rows: int) -> DecodeBatch:
    tokens, positions = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    active, page_table = np.zeros(num_rows, bool), np.zeros((num_rows, table_width), np.int32)
    for row, chunk in enumerate(chunks):
        if chunk is not None:
            tokens[row], positions[row], active[row] = chunk.tokens[0], chunk.start, True
            page_table[row, : len(chunk.pages)] = chunk.pages
    return DecodeBatch(*map(jnp.asarray, (tokens, positions, active, page_table)))


@partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def _prefill(
    arch: Architecture,
    params: Params,
    pool: KVPool,
    batch: PrefillBatch,
    page_size: int,
    sharding: LayerSharding,
) -> Any:
    hidden, pool, load = forward_prefill(arch, params, pool, batch, page_size=page_size, sharding=sharding)
    return unembed(arch, params, hidden), pool, load.tokens


@partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def _decode(
    arch: Architecture,
    params: Params,
    pool: KVPool,
    batch: DecodeBatch,
    page_size: int,
    sharding: LayerSharding,
) -> Any:
    hidden, pool, load = forward_decode(arch, params, pool, batch, page_size=page_size, sharding=sharding)
    return unembed(arch, params, hidden), pool, load.tokens
