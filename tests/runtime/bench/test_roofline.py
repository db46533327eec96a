import json
from pathlib import Path

import pytest

from runtime.bench.limits import MachineLimits
from runtime.bench.roofline import decode_bound, load_shape, prefill_bound

QWEN = {
    "hidden_size": 1024, "num_hidden_layers": 16, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 32000,
    "moe_intermediate_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def test_active_weights_of_a_known_model(folder: Path) -> None:
    shape = load_shape(folder)
    layer = 2 * 1024 * 1024 + 2 * 1024 * 256 + 1024 * 32 + 4 * 3 * 1024 * 512
    assert shape.active == 16 * layer + 1024 * 32000
    assert shape.read(4) == shape.active
    assert shape.distinct_experts(1) == pytest.approx(4)
    assert 31.9 < shape.distinct_experts(64) < 32


def test_other_families_name_their_experts_differently(tmp_path: Path) -> None:
    mixtral = {k: v for k, v in QWEN.items() if k not in ("num_experts", "moe_intermediate_size", "head_dim")}
    (tmp_path / "config.json").write_text(
        json.dumps(mixtral | {"num_local_experts": 8, "num_experts_per_tok": 2})
    )
    shape = load_shape(tmp_path)
    assert shape.num_experts == 8
    assert shape.expert == 3 * 1024 * 2048
    assert shape.query_dim == 1024


def test_one_row_is_bound_by_reading_and_a_long_prompt_by_products(folder: Path) -> None:
    shape, limits = load_shape(folder), MachineLimits(read_gbps=25.0, bf16_gflops=400.0)
    one = decode_bound(shape, 1, 160, limits)
    assert one.limited_by == "memory"
    assert one.tokens_s == pytest.approx(25e9 / (2 * (shape.active + 160 * 16 * 2 * 256)), rel=1e-3)
    assert prefill_bound(shape, 512, 1, limits).limited_by == "compute"


def test_without_a_rate_of_products_memory_is_the_bound(folder: Path) -> None:
    assert prefill_bound(load_shape(folder), 512, 1, MachineLimits(read_gbps=25.0)).limited_by == "memory"
