"""Steps on eight GPUs with experts spread over them, for `python -m pallas_kernels.aot`; two micro-batches a step."""

from functools import partial
from typing import Any

from jax.sharding import Mesh

from pallas_kernels.aot_cases import AotStep
from runtime.engine.aot_overlap import DECODE_ROWS, NUM_GPUS, PREFILL_TOKENS, Rung, mesh_rung
from runtime.ladder.aot_steps import FEW_LAYERS, MIB, QWEN3_30B_A3B


def _build(phase: str, num_tokens: int, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    return mesh_rung(mesh, Rung(layers=FEW_LAYERS, phase=phase, size=num_tokens))


def _step(phase: str, num_tokens: int, temp_mib: int) -> AotStep:
    local_tokens = num_tokens // NUM_GPUS
    return AotStep(
        f"qwen3-30b-a3b[{FEW_LAYERS} layers]/{phase}-{num_tokens}/experts on {NUM_GPUS}",
        partial(_build, phase, num_tokens),
        max_temp_bytes=temp_mib * MIB,
        dense_elements=local_tokens * QWEN3_30B_A3B["num_experts"] * QWEN3_30B_A3B["hidden_size"],
        devices=NUM_GPUS,
        is_quick=False,
    )


AOT_STEPS: tuple[AotStep, ...] = (
    _step("decode", DECODE_ROWS, 1024),
    _step("prefill", PREFILL_TOKENS, 8192),
)
