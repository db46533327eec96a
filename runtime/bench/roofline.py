"""Bounds from a model's shape: bytes and operations that no implementation can avoid.

Decode is bound by reading weights: everything dense once a step, and of the experts the number of distinct ones that
B rows pick when each takes k of E evenly. Prefill is bound by products, with every expert read once.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.limits import MachineLimits, significant

BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Bound:
    """Best possible tokens/s and what sets it."""

    tokens_s: float
    limited_by: str  # "memory" or "compute"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters by part, from config.json; counts are numbers of weights, not bytes."""

    vocab_size: int
    max_context: int
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    attention: int  # of one layer
    router: int
    expert: int
    head: int
    query_dim: int
    kv_dim: int

    @property
    def active(self) -> int:
        """Weights one token passes through, the embedding row apart."""
        layer = self.attention + self.router + self.num_experts_per_tok * self.expert
        return self.num_layers * layer + self.head

    def read(self, num_experts: float) -> float:
        """Weights read in a step that touches `num_experts` experts of each layer."""
        return self.num_layers * (self.attention + self.router + num_experts * self.expert) + self.head

    def distinct_experts(self, num_rows: int) -> float:
        """Expected experts of a layer that num_rows rows touch, when all are equally likely."""
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** num_rows)


def load_shape(folder: Path) -> ModelShape:
    """ModelShape of a folder in Hugging Face layout."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden = int(config["hidden_size"])
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // num_heads)
    query_dim = num_heads * head_dim
    kv_dim = int(config.get("num_key_value_heads") or num_heads) * head_dim
    num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return ModelShape(
        vocab_size=int(config["vocab_size"]),
        max_context=int(config.get("max_position_embeddings", 2048)),
        num_layers=int(config["num_hidden_layers"]),
        num_experts=num_experts,
        num_experts_per_tok=int(config.get("num_experts_per_tok", 1)),
        attention=2 * hidden * query_dim + 2 * hidden * kv_dim,
        router=hidden * num_experts,
        expert=3 * hidden * width,
        head=hidden * int(config["vocab_size"]),
        query_dim=query_dim,
        kv_dim=kv_dim,
    )


def decode_bound(
    shape: ModelShape, num_rows: int, context: int, limits: MachineLimits, dtype: str = "bf16"
) -> Bound:
    """Bound of decoding num_rows rows whose KV holds `context` positions each."""
    kv = num_rows * context * shape.num_layers * 2 * shape.kv_dim
    memory_s = (shape.read(shape.distinct_experts(num_rows)) + kv) * BYTES[dtype] / limits.read_gbps / 1e9
    flops = 2 * num_rows * shape.active + 4 * num_rows * context * shape.num_layers * shape.query_dim
    return _bound(num_rows, memory_s, flops, limits, dtype)


def prefill_bound(
    shape: ModelShape, prompt_len: int, num_prompts: int, limits: MachineLimits, dtype: str = "bf16"
) -> Bound:
    """Bound of prompts computed together; causal attention sees half of a prompt on average."""
    num_tokens = num_prompts * prompt_len
    memory_s = shape.read(shape.num_experts) * BYTES[dtype] / limits.read_gbps / 1e9
    attention = 4 * shape.num_layers * shape.query_dim * prompt_len / 2
    flops = num_tokens * (2 * (shape.active - shape.head) + attention) + 2 * num_prompts * shape.head
    return _bound(num_tokens, memory_s, flops, limits, dtype)


def _bound(num_tokens: int, memory_s: float, flops: float, limits: MachineLimits, dtype: str) -> Bound:
    gflops = limits.bf16_gflops if dtype == "bf16" else limits.f32_gflops
    compute_s = flops / gflops / 1e9 if gflops else 0.0
    return Bound(
        significant(num_tokens / max(memory_s, compute_s)), "memory" if memory_s >= compute_s else "compute"
    )
