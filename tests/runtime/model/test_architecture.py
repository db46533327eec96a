"""Published configs read as they are, newer spellings read alike, and unknown settings refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import ModelLoadError
from runtime.model.architecture import FfnKind, QkNorm, from_hf_config, load_architecture

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip


def test_qwen3_30b_a3b() -> None:
    arch = from_hf_config(QWEN3_30B)
    assert (arch.num_layers, arch.q_size, arch.kv_size) == (48, 4096, 512)
    assert (arch.num_experts, arch.top_k, arch.expert_ffn, arch.norm_topk_prob) == (128, 8, 768, True)
    assert arch.qk_norm is QkNorm.PER_HEAD
    assert {layer.ffn for layer in arch.layers} == {FfnKind.SPARSE}
    assert arch.rope.theta == 1e6
    assert arch.eos_token_ids == (151645,)
    assert arch.num_params == pytest.approx(30.5e9, rel=0.01)


def test_mixtral_8x7b() -> None:
    arch = from_hf_config(MIXTRAL_8X7B)
    assert (arch.head_dim, arch.expert_ffn, arch.norm_topk_prob, arch.qk_norm) == (
        128,
        14336,
        True,
        QkNorm.NONE,
    )
    assert arch.num_params == pytest.approx(46.7e9, rel=0.01)


def test_olmoe_1b_7b() -> None:
    arch = from_hf_config(OLMOE_1B_7B)
    assert (arch.head_dim, arch.qk_norm, arch.clip_qkv, arch.norm_topk_prob) == (
        128,
        QkNorm.FULL,
        None,
        False,
    )
    assert arch.num_params == pytest.approx(6.9e9, rel=0.01)


def test_newer_spelling_means_the_same() -> None:
    newer = dict(QWEN3_30B)
    newer["num_local_experts"] = newer.pop("num_experts")
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": newer.pop("rope_theta")}
    del newer["rope_scaling"]
    assert from_hf_config(newer) == from_hf_config(QWEN3_30B)


def test_architecture_is_hashable() -> None:
    assert hash(from_hf_config(QWEN3_30B)) == hash(from_hf_config(dict(QWEN3_30B)))


def test_dense_layers_among_sparse_ones() -> None:
    arch = from_hf_config(
        {**QWEN3_30B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [layer.ffn.value for layer in arch.layers] == [
        "dense",
        "sparse",
        "dense",
        "dense",
        "dense",
        "sparse",
    ]
    assert arch.dense_ffn == 6144


@pytest.mark.parametrize(("use", "expected"), [(True, 4096), (False, None)])
def test_qwen3_window_counts_only_when_in_use(use: bool, expected: int | None) -> None:
    arch = from_hf_config({**QWEN3_30B, "use_sliding_window": use, "sliding_window": 4096})
    assert {layer.sliding_window for layer in arch.layers} == {expected}


def test_default_theta_depends_on_the_family() -> None:
    config = {key: value for key, value in MIXTRAL_8X7B.items() if key != "rope_theta"}
    assert from_hf_config(config).rope.theta == 1e6


def test_linear_rope_stretches_every_channel() -> None:
    plain = from_hf_config(QWEN3_30B).rope
    scaled = from_hf_config({**QWEN3_30B, "rope_scaling": {"type": "linear", "factor": 4.0}}).rope
    np.testing.assert_allclose(np.array(scaled.inv_freq) * 4, plain.inv_freq, rtol=1e-6)


def test_yarn_keeps_fast_channels_and_stretches_slow_ones() -> None:
    plain = from_hf_config(QWEN3_30B).rope
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = from_hf_config({**QWEN3_30B, "rope_scaling": yarn}).rope
    ratio = np.array(plain.inv_freq) / np.array(scaled.inv_freq)
    np.testing.assert_allclose(ratio[[0, -1]], [1, 4], rtol=1e-5)
    assert np.all(np.diff(ratio) >= -1e-5)
    assert scaled.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


REFUSED = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures", "Qwen3MoeForCausalLM"),
    ({"architectures": None}, "architectures", "supported"),
    ({"architectures": [["x"]]}, "architectures", "supported"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'", "silu"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'", "yarn"),
    ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type", "yarn"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'", "mapping"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor is '2'", "positive"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None", "positive"),
    ({"rope_theta": -1}, "rope_theta is -1", "positive"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5", "1"),
    ({"head_dim": 7}, "head_dim is 7", "even"),
    ({"hidden_size": 1 << 60}, "hidden_size", "an integer from 1"),
    ({"hidden_size": True}, "hidden_size is True", "an integer"),
    ({"hidden_size": None}, "hidden_size is None", "an integer"),
    ({"num_hidden_layers": 100_000}, "num_hidden_layers", "4096"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0", "1"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5", "divisor of num_attention_heads 32"),
    ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129", "128"),
    ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'", "list"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'", "true or false"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0", "positive"),
    ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "allowed"), REFUSED)
def test_refusals_name_field_value_and_what_is_allowed(
    change: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        from_hf_config({**QWEN3_30B, **change})
    assert field in caught.value.message
    assert allowed in caught.value.message


def test_end_of_text_ids_of_both_files_join(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert load_architecture(tmp_path).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '"x"', "NaN"])
def test_broken_config_files_are_load_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_architecture(tmp_path)


def test_missing_folder_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_architecture(tmp_path / "nowhere")
