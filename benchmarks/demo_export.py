"""Write the trained demo model in Hugging Face layout: config.json, generation_config.json, model.safetensors in bfloat16."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from demo_model import ModelConfig
from demo_tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS
from safetensors.numpy import save_file

MAX_LEN = 2048  # the longest windows seen in training
EOS_IDS = [SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)]


def write_model(params: dict, config: ModelConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(params, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(config), indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": EOS_IDS,
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def config_of(config: ModelConfig) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "decoder_sparse_step": 1,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        # The dense width, which no layer of this model uses; required by the format.
        "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,
        "max_position_embeddings": MAX_LEN,
        "max_window_layers": config.num_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "output_router_logits": False,
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.005,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def tensors_of(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Hugging Face names; a projection is stored as [out, in], the transpose of the training layout."""

    def cast(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))

    tensors = {
        "model.embed_tokens.weight": cast(params["embed_tokens"]),
        "model.norm.weight": cast(params["norm"]["weight"]),
    }
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        attention, experts = params[f"attention_{i}"], params[f"experts_{i}"]
        tensors[f"{prefix}.input_layernorm.weight"] = cast(params[f"input_norm_{i}"]["weight"])
        tensors[f"{prefix}.post_attention_layernorm.weight"] = cast(params[f"post_norm_{i}"]["weight"])
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = cast(np.asarray(attention[name]).T)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = cast(attention[name]["weight"])
        tensors[f"{prefix}.mlp.gate.weight"] = cast(np.asarray(experts["router"]).T)
        for e in range(config.num_experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{prefix}.mlp.experts.{e}.{name}.weight"] = cast(np.asarray(experts[name][e]).T)
    return tensors
