"""Checkpoints load into the layout in use, and every kind of broken folder is one clear ModelLoadError."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.errors import ModelLoadError
from runtime.experts.weights import MoEParams
from runtime.model.architecture import from_hf_config, load_architecture
from runtime.model.checkpoint import INDEX_FILE, load_params
from runtime.model.params import DenseParams, Params, abstract_params, init_params
from runtime.model.spec import tree_nbytes
from tests.runtime.model.builders import CHECKPOINTS, QWEN3_CONFIG


def load(folder: Path, dtype: Any = jnp.float32, **options: Any) -> Params:
    return load_params(folder, load_architecture(folder), dtype, **options)


def as_numpy(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "mixtral"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "qwen3-window-sharded", tmp_path / "sharded"))


def test_every_weight_has_its_place() -> None:
    folder = CHECKPOINTS / "qwen3-dense-among-sparse"  # attention biases, dense and sparse layers, float16
    params, raw = load(folder), as_numpy(folder)
    attention = params.layers[1].attention
    prefix = "model.layers.1.self_attn"
    expected = np.concatenate([raw[f"{prefix}.{n}_proj.weight"] for n in "qkv"])
    np.testing.assert_array_equal(attention.w_qkv, expected.astype(np.float32))
    expected = np.concatenate([raw[f"{prefix}.{n}_proj.bias"] for n in "qkv"])
    np.testing.assert_array_equal(attention.b_qkv, expected.astype(np.float32))
    sparse, dense = params.layers[1].ffn, params.layers[0].ffn
    assert isinstance(sparse, MoEParams)
    assert isinstance(dense, DenseParams)
    up = raw["model.layers.1.mlp.experts.2.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(sparse.w_gate_up[2, up.shape[0] :], up)
    gate = raw["model.layers.0.mlp.gate_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(dense.w_gate_up[: gate.shape[0]], gate)


def test_loaded_arrays_have_the_described_shapes_and_types() -> None:
    folder = CHECKPOINTS / "olmoe-clip"
    params = load(folder, jnp.bfloat16)
    described = jax.tree.leaves(abstract_params(load_architecture(folder), jnp.bfloat16))
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(params)] == [(s.shape, s.dtype) for s in described]


def test_dummy_weights_follow_the_seed_and_the_description() -> None:
    arch = from_hf_config(QWEN3_CONFIG)
    one, same, other = (jax.tree.leaves(init_params(arch, jnp.bfloat16, seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one[0], other[0])
    described = jax.tree.leaves(abstract_params(arch, jnp.bfloat16))
    assert [(a.shape, a.dtype) for a in one] == [(s.shape, s.dtype) for s in described]
    assert tree_nbytes(abstract_params(arch, jnp.bfloat16)) == sum(a.nbytes for a in one)


def test_progress_ends_at_the_total(mixtral: Path) -> None:
    calls: list[tuple[int, int]] = []
    params = load(mixtral, on_progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (tree_nbytes(params), tree_nbytes(params))
    assert calls == sorted(calls)


def test_the_model_exists_once_on_a_cpu(tmp_path: Path) -> None:
    layers, e, f, d = 6, 4, 512, 256
    sizes = {"hidden_size": d, "num_experts": e, "moe_intermediate_size": f, "num_hidden_layers": layers}
    arch = from_hf_config({**QWEN3_CONFIG, **sizes})
    shapes = {"model.embed_tokens": (64, d), "lm_head": (64, d), "model.norm": (d,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in {
            "input_layernorm": (d,), "post_attention_layernorm": (d,), "mlp.gate": (e, d),
            "self_attn.q_proj": (32, d), "self_attn.k_proj": (16, d), "self_attn.v_proj": (16, d),
            "self_attn.o_proj": (d, 32), "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
        }.items()}  # fmt: skip
        for expert in range(e):
            prefix = f"model.layers.{i}.mlp.experts.{expert}"
            shapes |= {
                f"{prefix}.gate_proj": (f, d),
                f"{prefix}.up_proj": (f, d),
                f"{prefix}.down_proj": (d, f),
            }
    save_file(
        {f"{name}.weight": np.ones(s, np.float32) for name, s in shapes.items()},
        tmp_path / "model.safetensors",
    )
    experts, total = 4 * 3 * e * f * d, tree_nbytes(abstract_params(arch, jnp.float32))
    tracemalloc.start()
    params = load_params(tmp_path, arch, jnp.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree_nbytes(params) == total
    assert peak < total + experts // 6


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    text = json.dumps(edit(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def set_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["model.norm.weight"].update({key: value})


BAD_HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h.pop("model.norm.weight") and None, "model.norm.weight"),
    (lambda h: h.update({"model.extra.weight": h["model.norm.weight"]}), "overlaps"),
    (lambda h: h.update({"model.norm.weight": [1]}), "lacks dtype"),
    (lambda h: ["not", "a", "mapping"], "not a JSON object"),
    (set_entry("dtype", "F8_E4M3"), "F8_E4M3"),
    (set_entry("dtype", ["F32"]), "dtype"),
    (set_entry("shape", [47]), "bytes"),
    (set_entry("shape", [-48]), "shape"),
    (set_entry("shape", [2**61, 2**61]), "bytes"),
    (set_entry("shape", [1] * 9), "shape"),
    (set_entry("shape", 48), "shape"),
    (set_entry("data_offsets", [0]), "data_offsets"),
    (set_entry("data_offsets", [96, 0]), "data_offsets"),
    (set_entry("data_offsets", [-96, 0]), "data_offsets"),
    (set_entry("data_offsets", [0.0, 96.0]), "data_offsets"),
    (set_entry("data_offsets", [2**50, 2**50 + 96]), "truncated"),
]


@pytest.mark.parametrize(("edit", "message"), BAD_HEADERS)
def test_bad_headers(mixtral: Path, edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_header(mixtral / "model.safetensors", edit)
    with pytest.raises(ModelLoadError, match=message):
        load(mixtral)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 10_000, -1])
def test_truncated_files(mixtral: Path, kept: int) -> None:
    path = mixtral / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(mixtral)


@pytest.mark.parametrize(
    "raw",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"{{{{",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
        (17).to_bytes(8, "little") + b'{"a":{}, "a":{}} ',
    ],
)
def test_headers_that_are_no_json(mixtral: Path, raw: bytes) -> None:
    (mixtral / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelLoadError, match="header"):
        load(mixtral)


def rewrite(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = as_numpy(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors_are_named(mixtral: Path) -> None:
    rewrite(mixtral, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))
    with pytest.raises(ModelLoadError, match=r"1 tensors are missing: model\.layers\.1.*experts\.3\.w2"):
        load(mixtral)


def test_unexpected_tensors_are_named(mixtral: Path) -> None:
    rewrite(mixtral, lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(48, np.float32)}))
    with pytest.raises(ModelLoadError, match=r"no place.*model\.layers\.3\.input_layernorm"):
        load(mixtral)


def test_wrong_shapes_show_both(mixtral: Path) -> None:
    rewrite(mixtral, lambda t: t.update({"model.norm.weight": np.ones(49, np.float32)}))
    with pytest.raises(ModelLoadError, match=r"\(49,\), config\.json implies \(48,\)"):
        load(mixtral)


def test_a_tied_head_may_be_stored_as_well(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS / "qwen3-gqa-tied", tmp_path / "tied"))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert load(folder).unembedding is None


def test_folders_without_weights(mixtral: Path, tmp_path: Path) -> None:
    arch = load_architecture(mixtral)
    (mixtral / "model.safetensors").rename(mixtral / "pytorch_model.bin")
    for folder, message in ((mixtral, "pickled weights"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(ModelLoadError, match=message):
            load_params(folder, arch, jnp.float32)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a\\x.safetensors",
        "..",
        "",
        "x.bin",
        7,
        None,
        "x\0.safetensors",
    ],
)
def test_index_pointing_elsewhere(sharded: Path, shard: Any) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="in the folder"):
        load(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000])
def test_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(sharded)


def test_missing_shard(sharded: Path) -> None:
    next(sharded.glob("model-00003*")).unlink()
    with pytest.raises(ModelLoadError, match=r"model-00003.*cannot be read"):
        load(sharded)


def test_index_and_shards_must_agree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"not in the index: model\.norm\.weight"):
        load(sharded)
    index["weight_map"] |= {"model.norm.weight": shard, "model.other.weight": shard}
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model\.other\.weight is not in"):
        load(sharded)
