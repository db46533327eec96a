"""Utilisation of a machine: work that a step could not avoid, over what the machine was measured to do in that time.

Never busy time: a device that waits for memory is busy. Two shares are stated, of the read bandwidth (weights of
the experts that even routing hits, and the KV of the rows) and of the matrix rate; the larger is the utilisation,
as it says how near the step is to the bound it would meet first. Both count the least work, so reading a weight twice
does not raise them. Weights that stay in cache can bring the memory share above 1 of a main memory's rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.bench.limits import MachineLimits
from runtime.bench.roofline import Bound, ModelShape, decode_bound, prefill_bound


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the machine's limits. `compute` is 0 where no matrix rate was measured."""

    memory: float
    compute: float

    @property
    def value(self) -> float:
        return max(self.memory, self.compute)

    @property
    def limited_by(self) -> str:
        return "memory" if self.memory >= self.compute else "compute"


def decode_utilisation(
    shape: ModelShape, num_rows: int, context: int, tokens_s: float, limits: MachineLimits, dtype: str
) -> Utilisation:
    """Of decoding num_rows rows with `context` KV positions each at tokens_s in all."""
    return _shares(tokens_s, limits, dtype, lambda one: decode_bound(shape, num_rows, context, one, dtype))


def prefill_utilisation(
    shape: ModelShape, prompt_len: int, num_prompts: int, tokens_s: float, limits: MachineLimits, dtype: str
) -> Utilisation:
    """Of computing prompts together at tokens_s in all."""
    return _shares(
        tokens_s, limits, dtype, lambda one: prefill_bound(shape, prompt_len, num_prompts, one, dtype)
    )


def _shares(
    tokens_s: float, limits: MachineLimits, dtype: str, bound: Callable[[MachineLimits], Bound]
) -> Utilisation:
    """Each share is tokens/s over the bound that its limit alone would set."""
    memory = bound(replace(limits, bf16_gflops=0.0, f32_gflops=0.0))
    rate = limits.bf16_gflops if dtype == "bf16" else limits.f32_gflops
    if not rate:
        return Utilisation(tokens_s / memory.tokens_s, 0.0)
    compute = bound(replace(limits, read_gbps=math.inf))
    return Utilisation(tokens_s / memory.tokens_s, tokens_s / compute.tokens_s)
