"""How a model routes, as plain data, and what the op returns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class RouterSpec:
    """The defaults are a plain top_k of a softmax.

    score: what logits become, one of SCORES.
    renormalise: the chosen scores are divided by their sum.
    num_groups: experts are cut into this many groups of neighbours; only the best `num_kept_groups` may be chosen from.
    num_group_best: a group is as good as the sum of its best 1 or 2 experts (DeepSeek-V2: 1, DeepSeek-V3: 2).
    scale: of the weights, after all else.
    """

    top_k: int
    score: str = "softmax"
    renormalise: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    num_group_best: int = 2
    scale: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raises ValueError naming the field that does not go with so many experts, or with another field."""
        if self.score not in SCORES:
            raise ValueError(f"score is {self.score!r}, expected one of {SCORES}")
        if not 1 <= self.num_kept_groups <= self.num_groups:
            raise ValueError(
                f"num_kept_groups is {self.num_kept_groups}, expected 1 to num_groups, {self.num_groups}"
            )
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups is {self.num_groups}, no divisor of the {num_experts} experts")
        width = num_experts // self.num_groups
        if not 1 <= self.top_k <= width * self.num_kept_groups:
            raise ValueError(
                f"top_k is {self.top_k}, expected 1 to {width * self.num_kept_groups}, the experts of the kept groups"
            )
        if self.is_grouped and not 1 <= self.num_group_best <= min(2, width):
            raise ValueError(
                f"num_group_best is {self.num_group_best}, expected 1 or 2 and at most the {width} experts of a group"
            )
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale is {self.scale}, expected a positive number")

    @property
    def is_grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.num_kept_groups < self.num_groups


class RouterChoice(NamedTuple):
    """weights float32 [T, k] and expert_ids int32 [T, k], best first; counts int32 [E]: real tokens of each expert."""

    weights: Any
    expert_ids: Any
    counts: Any
