"""The engine's own decode and prefill steps of real models with abstract weights, for `python -m pallas_kernels.aot`.

DeepSeek-V3 stands here with its mixture-of-experts layers at full size (256 experts, 8 a token) under grouped-query attention
of as many heads, a softmax router and no shared expert: its own attention (MLA) and router are no part of the server yet.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.aot_cases import AotStep
from runtime.cache.kv_pool import abstract_kv_pool
from runtime.ladder.bucket import Bucket, decode_bucket, prefill_bucket
from runtime.ladder.compiler import AbstractState, rung_step
from runtime.ladder.step import SCORE_CHUNK, StepShape, abstract_row_state
from runtime.model.architecture import Architecture, from_hf_config
from runtime.model.params import abstract_params
from runtime.model.sampling import abstract_sampling_state
from runtime.model.spec import to_shape_structs

PAGE_SIZE = 64
NUM_PAGES = 4096
PAGES_PER_ROW = 64
MAX_PREFILL_ROWS = 8
FEW_LAYERS = 2  # all layers are alike; two show what happens between them
DTYPE = jnp.bfloat16
MIB = 1 << 20

# config.json of Qwen/Qwen3-30B-A3B
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3_MOE: dict[str, Any] = QWEN3_30B_A3B | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_experts": 256,
    "num_hidden_layers": 61,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "vocab_size": 129280,
}


def engine_step(
    model: str, config: dict[str, Any], num_layers: int, bucket: Bucket, temp_mib: int, *, is_quick: bool
) -> AotStep:
    """The step that the engine would compile for this rung, with a pool of 4096 pages."""
    arch = from_hf_config(config | {"num_hidden_layers": num_layers})
    return AotStep(
        name=f"{model}[{num_layers} layers]/{bucket.name}",
        build=partial(_build, arch, bucket),
        max_temp_bytes=temp_mib * MIB,
        dense_elements=bucket.tokens * arch.num_experts * arch.hidden_size,
        min_alias_bytes=abstract_kv_pool(arch, NUM_PAGES, PAGE_SIZE, DTYPE).nbytes,
        is_quick=is_quick,
    )


def _build(arch: Architecture, bucket: Bucket, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    shape = StepShape(bucket.rows, PAGE_SIZE, PAGES_PER_ROW, bucket.tokens)
    abstract = AbstractState(
        to_shape_structs(abstract_params(arch, DTYPE)),
        abstract_kv_pool(arch, NUM_PAGES, PAGE_SIZE, DTYPE),
        abstract_row_state(shape),
        abstract_sampling_state(shape.num_slots, arch.vocab_size),
        jax.ShapeDtypeStruct((bucket.tokens + SCORE_CHUNK, arch.hidden_size), DTYPE),
    )
    return rung_step(arch, shape, bucket, abstract)


DECODE, PREFILL = decode_bucket(64), prefill_bucket(2048, PAGE_SIZE, MAX_PREFILL_ROWS)
_QWEN3, _DEEPSEEK = ("qwen3-30b-a3b", QWEN3_30B_A3B), ("deepseek-v3-moe-gqa", DEEPSEEK_V3_MOE)
AOT_STEPS: tuple[AotStep, ...] = (
    engine_step(*_QWEN3, 48, DECODE, 256, is_quick=False),
    engine_step(
        *_QWEN3, 48, PREFILL, 2048, is_quick=False
    ),  # XLA's attention keeps a zeroed result for each layer
    engine_step(*_QWEN3, FEW_LAYERS, DECODE, 256, is_quick=True),
    engine_step(*_QWEN3, FEW_LAYERS, PREFILL, 512, is_quick=True),
    engine_step(*_DEEPSEEK, FEW_LAYERS, DECODE, 256, is_quick=True),
    engine_step(*_DEEPSEEK, FEW_LAYERS, PREFILL, 2048, is_quick=True),
)
