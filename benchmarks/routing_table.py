"""What a fixed routing table and a cache of frequent patterns cost in quality: `python -m benchmarks.routing_table`.

The embedded model writes text at temperature 1, half to learn the tables from and half to score. Its own text is what it
predicts best, so any change of its routing shows as a higher loss. Prints a table; a few minutes on two cores.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from runtime.cache.kv_pool import KVPool, make_kv_pool
from runtime.engine.build import EMBEDDED_MODEL
from runtime.experts import layer as experts_layer
from runtime.experts.router import Routing
from runtime.experts.routing_table import RoutingTable, SeenRouting, build_table
from runtime.experts.weights import MoEParams
from runtime.model.architecture import Architecture, load_architecture
from runtime.model.batch import DecodeBatch
from runtime.model.checkpoint import load_params
from runtime.model.params import Params
from runtime.model.transformer import forward_decode, unembed

PAGE_SIZE = 64


@dataclass(frozen=True)
class Row:
    """One way to route. known_share: of (token, layer) that the table answered; same_share: where it agreed."""

    name: str
    nats_per_token: float
    known_share: float
    same_share: float


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--texts", type=int, default=128, help="texts to write; half are scored (default: 128)"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of each (default: 256)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.texts, options.length)
    for row in rows:
        print(
            f"{row.name:44} {row.nats_per_token:7.4f} nats  known {row.known_share:5.1%}  same {row.same_share:5.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def measure(num_texts: int, length: int) -> list[Row]:
    """The router alone, a fixed table, and caches of growing strictness."""
    arch = load_architecture(EMBEDDED_MODEL)
    params = load_params(EMBEDDED_MODEL, arch, jnp.float32)
    half = num_texts // 2
    texts = write(arch, params, num_texts, length)
    learnt = score(arch, params, texts[:half])[1]
    loss, seen = score(arch, params, texts[half:])
    rows = [Row("router", loss, 0.0, 1.0)]
    variants = [("fixed table", 1, 0.0)] + [
        (f"cache, {share:.0%} of 8 or more", 8, share) for share in (0.5, 0.9, 1.0)
    ]
    for name, min_count, min_share in variants:
        tables = [build_table(s, arch.vocab_size, min_count=min_count, min_share=min_share) for s in learnt]
        loss = score(arch, with_tables(params, tables), texts[half:])[0]
        known, same = agreement(tables, seen)
        rows.append(Row(name, loss, known, same))
    return rows


def with_tables(params: Params, tables: list[RoutingTable]) -> Params:
    """The same weights, with a table before each router."""
    todo = iter(tables)
    layers = [
        replace(layer, ffn=replace(layer.ffn, routing_table=next(todo)))
        if isinstance(layer.ffn, MoEParams)
        else layer
        for layer in params.layers
    ]
    return replace(params, layers=tuple(layers))


def agreement(tables: list[RoutingTable], seen: list[SeenRouting]) -> tuple[float, float]:
    """(share that the tables know, share of these with the router's own experts)."""
    known, same, total = 0, 0, 0
    for table, found in zip(tables, seen, strict=True):
        is_known = np.asarray(table.is_known)[found.tokens]
        ids = np.asarray(table.expert_ids)[found.tokens]
        is_same = (np.sort(ids, axis=1) == np.sort(found.expert_ids, axis=1)).all(axis=1)
        known, same, total = known + is_known.sum(), same + (is_known & is_same).sum(), total + len(is_known)
    return known / total, same / max(1, known)


def write(arch: Architecture, params: Params, num_texts: int, length: int) -> np.ndarray:
    """Texts [N, length] at temperature 1, each from a random first token."""
    tokens = np.zeros((num_texts, length), np.int32)
    tokens[:, 0] = np.random.default_rng(0).integers(0, arch.vocab_size, num_texts)
    pool, step = make_pool(arch, num_texts, length), jax.jit(partial(next_logits, arch), donate_argnums=(1,))
    key = jax.random.key(0)
    for position in range(length - 1):
        logits, pool, _ = step(params, pool, tokens[:, position], jnp.int32(position))
        tokens[:, position + 1] = jax.random.categorical(jax.random.fold_in(key, position), logits)
    return tokens


def score(arch: Architecture, params: Params, texts: np.ndarray) -> tuple[float, list[SeenRouting]]:
    """(mean loss of a token, what each layer's router decided)."""
    pool, step = make_pool(arch, *texts.shape), jax.jit(partial(next_logits, arch), donate_argnums=(1,))
    nats, routed = [], []
    for position in range(texts.shape[1] - 1):
        logits, pool, seen = step(params, pool, texts[:, position], jnp.int32(position))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), texts[:, position + 1, None], axis=1)
        nats.append(-np.asarray(chosen))
        routed.append(jax.tree.map(np.asarray, seen))
    tokens = texts[:, :-1].T.reshape(-1)
    layers = [
        SeenRouting(
            tokens,
            *(np.concatenate([getattr(r[i], name) for r in routed]) for name in ("expert_ids", "weights")),
        )
        for i in range(len(routed[0]))
    ]
    return float(np.mean(nats)), layers


def make_pool(arch: Architecture, num_texts: int, length: int) -> KVPool:
    return make_kv_pool(arch, 1 + num_texts * -(-length // PAGE_SIZE), PAGE_SIZE, jnp.float32)


def next_logits(
    arch: Architecture, params: Params, pool: KVPool, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, KVPool, list[Routing]]:
    """All texts one token further."""
    num_texts = tokens.shape[0]
    pages_per_text = (pool.pages[0].shape[0] - 1) // num_texts
    batch = DecodeBatch(
        tokens=tokens,
        positions=jnp.full(num_texts, position),
        active=jnp.ones(num_texts, bool),
        page_table=1 + jnp.arange(num_texts * pages_per_text, dtype=jnp.int32).reshape(num_texts, -1),
    )
    with recorded_routing() as seen:
        hidden, pool, _ = forward_decode(arch, params, pool, batch, page_size=PAGE_SIZE)
    return unembed(arch, params, hidden), pool, seen


@contextmanager
def recorded_routing() -> Iterator[list[Routing]]:
    """Collects what the routers decide while a step is traced: the model itself does not return it."""
    seen: list[Routing] = []
    route = experts_layer.route

    def recording(*args, **options) -> Routing:
        seen.append(route(*args, **options))
        return seen[-1]

    experts_layer.route = recording
    try:
        yield seen
    finally:
        experts_layer.route = route


if __name__ == "__main__":
    main()
