"""The tiny models that are compared with transformers: named ones (committed as fixtures) and random ones. Plain data."""

import random
from typing import Any

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}

_SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 160, "max_position_embeddings": 512}
_QWEN3 = {
    **_SMALL,
    "model_type": "qwen3_moe",
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
_MIXTRAL = {**_SMALL, "model_type": "mixtral", "intermediate_size": 24, "eos_token_id": 2}
_OLMOE = {**_SMALL, "model_type": "olmoe", "intermediate_size": 24, "eos_token_id": 7, "pad_token_id": 1}


def _heads(num_heads: int, num_kv_heads: int) -> dict[str, int]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}


def _experts(num_experts: int, top_k: int) -> dict[str, int]:
    return {"num_experts": num_experts, "num_experts_per_tok": top_k}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

# "_store" says how the checkpoint is written: weight dtype, shard size, fused experts, spelling of config.json.
FIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-gqa-tied": {**_QWEN3, **_heads(6, 3), **_experts(8, 2), "norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen3-dense-among-sparse": {
        **_QWEN3, **_heads(4, 4), **_experts(4, 1), "num_hidden_layers": 4, "mlp_only_layers": [3],
        "decoder_sparse_step": 2, "attention_bias": True, "_store": {"dtype": "float16"},
    },
    "qwen3-yarn-top8": {
        **_QWEN3, **_heads(7, 1), **_experts(16, 8), "norm_topk_prob": True, "rope_parameters": YARN,
        "eos_token_id": [5, 9], "_store": {"published": True},
    },
    "qwen3-window-sharded": {
        **_QWEN3, **_heads(4, 2), **_experts(8, 3), "use_sliding_window": True, "sliding_window": 20,
        "_store": {"dtype": "float32", "shard_size": "120KB"},
    },
    "mixtral": {**_MIXTRAL, **_heads(6, 2), **_experts(8, 2), "_store": {"published": True}},
    "mixtral-window-fused": {
        **_MIXTRAL, **_heads(5, 1), **_experts(4, 2), "head_dim": 8, "sliding_window": 24, "_store": {"fused": True},
    },
    "mixtral-llama3-top1": {**_MIXTRAL, **_heads(3, 3), **_experts(6, 1), "rope_parameters": LLAMA3},
    "olmoe-clip": {**_OLMOE, **_heads(4, 4), **_experts(16, 8), "clip_qkv": 1.0},
    "olmoe-gqa-linear-tied": {
        **_OLMOE, **_heads(6, 2), **_experts(8, 4), "rope_parameters": LINEAR, "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_case(rng: random.Random) -> dict[str, Any]:
    """One small model of any family with any setting that the family has.

    No window of 1: the cache of transformers then keeps every key, so its decode differs from its own prefill.
    """
    family = rng.choice(list(ARCHITECTURES))
    num_kv_heads = rng.randint(1, 4)
    num_heads = num_kv_heads * rng.randint(1, 4)
    head_dim = rng.choice([4, 6, 8, 16])
    num_experts = rng.randint(1, 20)
    case = {
        "model_type": family,
        "num_hidden_layers": rng.randint(1, 4),
        "vocab_size": rng.randint(128, 400),
        "max_position_embeddings": 512,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": rng.choice([8, 20, 32]),
        **_heads(num_heads, num_kv_heads),
        **_experts(num_experts, rng.randint(1, min(8, num_experts))),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rng.choice([YARN, LLAMA3, LINEAR, {"rope_type": "default", "rope_theta": 5e5}]),
        "_store": {
            "dtype": rng.choice(["float32", "bfloat16", "float16"]),
            "published": rng.random() < 0.5,
            "fused": rng.random() < 0.3,
            "shard_size": rng.choice(["30KB", "1GB"]),
        },
    }
    if family == "qwen3_moe":
        case |= {
            "hidden_size": rng.choice([16, 40, 64]), "head_dim": head_dim, "moe_intermediate_size": rng.choice([8, 12]),
            "norm_topk_prob": rng.random() < 0.5, "attention_bias": rng.random() < 0.3,
            "decoder_sparse_step": rng.randint(1, 2), "mlp_only_layers": rng.choice([[], [0], [1]]),
            "use_sliding_window": rng.random() < 0.3, "sliding_window": rng.randint(2, 60),
        }  # fmt: skip
    elif family == "mixtral":
        case |= {
            "hidden_size": rng.choice([16, 40, 64]), "head_dim": head_dim,
            "sliding_window": rng.choice([None, None, 2, 7, 33]),
        }  # fmt: skip
    else:
        case |= {"norm_topk_prob": rng.random() < 0.5, "clip_qkv": rng.choice([None, 0.5, 2.0])}
    return case
