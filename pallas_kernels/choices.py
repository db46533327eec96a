"""What every op would run on this machine, and why: for `python -m pallas_kernels`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backend import BackendChoice
from pallas_kernels.expert_mlp.op import choose_expert_mlp
from pallas_kernels.grouped_matmul.op import choose_grouped_matmul
from pallas_kernels.linear.op import choose_linear
from pallas_kernels.mla_attention.op import choose_mla_attention
from pallas_kernels.paged_attention.op import choose_paged_attention
from pallas_kernels.prefill_attention.op import choose_prefill_attention
from pallas_kernels.quantized_matmul.op import choose_quantized_matmul
from pallas_kernels.quantized_matmul.quantise import BLOCK, E4M3, QuantizedWeights
from pallas_kernels.router.op import choose_router
from pallas_kernels.router.spec import RouterSpec


@dataclass(frozen=True)
class OpChoice:
    """operands: what was asked about, in words."""

    op: str
    operands: str
    choice: BackendChoice


def list_choices() -> tuple[OpChoice, ...]:
    """Every op at operands of a real model in bfloat16. Nothing is computed; native kernels may be compiled."""
    return tuple(OpChoice(op, operands, choose()) for op, operands, choose in _QUESTIONS)


def _abstract(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _quantised(dtype: jax.typing.DTypeLike, *scales: int) -> QuantizedWeights:
    return QuantizedWeights(_abstract(256, 4096, 7168, dtype=dtype), _abstract(*scales, dtype=jnp.float32))


_X, _GATE_UP, _DOWN = _abstract(512, 2048), _abstract(128, 1536, 2048), _abstract(128, 2048, 768)
_PAGES = _abstract(64, 2, 4, 64, 128)
_QWEN3 = RouterSpec(8, renormalise=True)
_DEEPSEEK = RouterSpec(8, "sigmoid", renormalise=True, num_groups=8, num_kept_groups=4, scale=2.5)

_QUESTIONS: tuple[tuple[str, str, Callable[[], BackendChoice]], ...] = (
    (
        "linear",
        "64 rows of 2048 times [4096, 2048]",
        lambda: choose_linear(_abstract(64, 2048), _abstract(4096, 2048)),
    ),
    ("expert_mlp", "Qwen3-30B-A3B, 512 rows", lambda: choose_expert_mlp(_X, _GATE_UP, _DOWN, "silu")),
    ("grouped_matmul", "its first product", lambda: choose_grouped_matmul(_X, _GATE_UP, "silu")),
    (
        "paged_attention",
        "Qwen3-30B-A3B, pages of 64",
        lambda: choose_paged_attention(_abstract(64, 32, 128), _PAGES),
    ),
    (
        "prefill_attention",
        "Qwen3-30B-A3B, pages of 64",
        lambda: choose_prefill_attention(_abstract(2048, 32, 128), _PAGES),
    ),
    ("mla_attention", "DeepSeek-V3, pages of 64", lambda: choose_mla_attention(_abstract(64, 64, 576), 512)),
    (
        "router",
        "Qwen3-30B-A3B, 64 tokens",
        lambda: choose_router(_abstract(64, 128, dtype=jnp.float32), _QWEN3),
    ),
    (
        "router",
        "DeepSeek-V3, 64 tokens",
        lambda: choose_router(_abstract(64, 256, dtype=jnp.float32), _DEEPSEEK),
    ),
    (
        "quantized_matmul",
        "DeepSeek-V3, e4m3 with scales of blocks",
        lambda: choose_quantized_matmul(_quantised(E4M3, 256, 4096 // BLOCK, 7168 // BLOCK), "silu"),
    ),
    (
        "quantized_matmul",
        "DeepSeek-V3, int8 weights",
        lambda: choose_quantized_matmul(_quantised(jnp.int8, 256, 4096), "silu"),
    ),
)
