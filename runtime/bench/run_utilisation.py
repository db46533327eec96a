"""Utilisation of a machine over a whole run of mixed steps: what the real tokens needed at least, over its limits.

As in `utilisation.py`: bytes of weights and KV that the launches could not avoid, operations of the real tokens. Busy
time counts for nothing, nor does padding.
"""

from typing import Any

from runtime.bench.limits import MachineLimits
from runtime.bench.replay import Played
from runtime.bench.roofline import BYTES, ModelShape
from runtime.bench.serving_metrics import rung_use
from runtime.bench.utilisation import Utilisation


def run_utilisation(
    played: Played, shape: ModelShape, limits: MachineLimits, mean_context: float, dtype: str
) -> Utilisation:
    """Shares of the machine's rates over `played.duration_s`; mean_context: positions that a token attends to."""
    sizes = {rung.name: rung.size for rung in played.after.rungs}
    entries = flops = 0.0
    for rung in rung_use(played):
        if rung["hits"]:
            more_entries, more_flops = _needed(rung, sizes[rung["name"]], shape, mean_context)
            entries, flops = entries + more_entries, flops + more_flops
    gflops = limits.bf16_gflops if dtype == "bf16" else limits.f32_gflops
    memory = entries * BYTES[dtype] / played.duration_s / limits.read_gbps / 1e9
    return Utilisation(memory, flops / played.duration_s / gflops / 1e9 if gflops else 0.0)


def _needed(rung: dict[str, Any], size: int, shape: ModelShape, mean_context: float) -> tuple[float, float]:
    """(weights and KV entries read, operations) of all of one rung's launches."""
    real = rung["real_tokens"]
    if rung["phase"] == "decode":
        num_steps = rung["computed_tokens"] / size
        kv = real * mean_context * shape.num_layers * 2 * shape.kv_dim
        read = num_steps * shape.read(shape.distinct_experts(max(1, round(real / num_steps)))) + kv
        return read, real * (2 * shape.active + 4 * mean_context * shape.num_layers * shape.query_dim)
    read = rung["hits"] * shape.read(shape.distinct_experts(max(1, round(real / rung["hits"]))))
    attention = 4 * shape.num_layers * shape.query_dim * mean_context / 2
    return read, real * (2 * (shape.active - shape.head) + attention)
