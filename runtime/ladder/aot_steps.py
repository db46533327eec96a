"""Whole steps of a real model with abstract weights, for `python -m pallas_kernels.aot`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.aot_cases import AotStep
from runtime.cache.kv_pool import abstract_kv_pool
from runtime.model.architecture import Architecture, from_hf_config
from runtime.model.batch import DecodeBatch, PrefillBatch
from runtime.model.params import abstract_params
from runtime.model.spec import to_shape_structs
from runtime.model.transformer import forward_decode, forward_prefill

PAGE_SIZE = 64
NUM_PAGES = 4096
PAGES_PER_ROW = 64
NUM_LAYERS = 2  # all layers are alike; two show what happens between them
DTYPE = jnp.bfloat16

# config.json of Qwen/Qwen3-30B-A3B but for the number of layers
QWEN3_30B_A3B = {
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
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def decode_step(arch: Architecture, name: str, num_rows: int) -> AotStep:
    """One token for each of `num_rows` rows."""
    batch = DecodeBatch(
        tokens=_ints(num_rows),
        positions=_ints(num_rows),
        active=_abstract((num_rows,), jnp.bool_),
        page_table=_ints(num_rows, PAGES_PER_ROW),
    )
    function = functools.partial(forward_decode, arch, page_size=PAGE_SIZE)
    return AotStep(f"{name}/decode/rows={num_rows}", function, (*_state(arch), batch), 64 << 20)


def prefill_step(arch: Architecture, name: str, num_tokens: int, num_rows: int) -> AotStep:
    """`num_tokens` tokens of up to `num_rows` prompts."""
    batch = PrefillBatch(
        tokens=_ints(num_tokens),
        row_start=_ints(num_rows),
        row_len=_ints(num_rows),
        context_len=_ints(num_rows),
        page_table=_ints(num_rows, PAGES_PER_ROW),
    )
    function = functools.partial(forward_prefill, arch, page_size=PAGE_SIZE)
    return AotStep(f"{name}/prefill/tokens={num_tokens}", function, (*_state(arch), batch), 512 << 20)


def _abstract(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> Any:
    return _abstract(shape, jnp.int32)


def _state(arch: Architecture) -> tuple:
    params = to_shape_structs(abstract_params(arch, DTYPE))
    return params, abstract_kv_pool(arch, NUM_PAGES, PAGE_SIZE, DTYPE)


_QWEN3 = from_hf_config(QWEN3_30B_A3B)
_NAME = f"qwen3-30b-a3b[{NUM_LAYERS} layers]"
AOT_STEPS: tuple[AotStep, ...] = (
    decode_step(_QWEN3, _NAME, num_rows=64),
    prefill_step(_QWEN3, _NAME, num_tokens=2048, num_rows=8),
)
