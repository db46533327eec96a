"""The named cases that test and benchmark share: tiny ones, the extremes, and shapes of real models."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call of the op: group sizes in order, and how many padding rows follow them."""

    name: str
    group_sizes: tuple[int, ...]
    num_padding: int = 0
    d: int = 32
    f: int = 16
    dtype: str = "bfloat16"

    @property
    def num_experts(self) -> int:
        return len(self.group_sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes) + self.num_padding


CASES: tuple[Case, ...] = (
    Case("one row", (0, 1, 0, 0)),
    Case("one expert takes all", (0, 0, 37, 0, 0)),
    Case("first and last expert", (5, 0, 0, 0, 0, 0, 0, 6)),
    Case("one-row groups", (1,) * 8),
    Case("even", (8,) * 8),
    Case("only padding", (0, 0, 0, 0), num_padding=7),
    Case("padding", (3, 0, 9, 1), num_padding=11),
    Case("padding after one hot expert", (0, 0, 0, 70), num_padding=58),
    Case("remainders around a block", (31, 33, 64, 65, 1, 0, 63, 127)),
    Case("float32", (3, 0, 9, 1), num_padding=3, dtype="float32"),
    Case("float32, large groups", (70, 0, 129, 33), dtype="float32"),
    Case("odd widths", (2, 5, 0, 9), num_padding=3, d=40, f=24),
)


@dataclass(frozen=True)
class ModelShape:
    """The routed part of one layer of a model."""

    name: str
    num_experts: int
    top_k: int
    d: int
    f: int

    def routed_group_sizes(self, num_tokens: int, seed: int) -> np.ndarray:
        """Group sizes of uniform routing: each token picks `top_k` different experts."""
        rng = np.random.default_rng(seed)
        choices = np.stack([rng.permutation(self.num_experts)[: self.top_k] for _ in range(num_tokens)])
        return np.bincount(choices.ravel(), minlength=self.num_experts).astype(np.int32)


MODEL_SHAPES: tuple[ModelShape, ...] = (
    ModelShape("bench-M", num_experts=32, top_k=4, d=1024, f=512),
    ModelShape("qwen3-30b-a3b", num_experts=128, top_k=8, d=2048, f=768),
    ModelShape("mixtral-8x7b", num_experts=8, top_k=2, d=4096, f=14336),
)
