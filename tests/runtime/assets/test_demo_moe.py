"""The embedded model is complete, small enough, and its config, tokenizer and chat template agree."""

import json
import struct
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[3] / "runtime/assets/demo-moe"
MAX_BYTES = 24_000_000


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config() -> dict:
    return json.loads((FOLDER / "tokenizer_config.json").read_text())


def tensor_shapes() -> dict[str, tuple[str, list[int]]]:
    """(dtype, shape) of each tensor, from the header alone."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (header_len,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_len))
    return {
        name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    }


def expected_shapes(config: dict) -> dict[str, tuple[str, list[int]]]:
    hidden, head_dim, width = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": [hidden],
            f"{layer}.post_attention_layernorm.weight": [hidden],
            f"{layer}.self_attn.q_proj.weight": [queries, hidden],
            f"{layer}.self_attn.k_proj.weight": [keys, hidden],
            f"{layer}.self_attn.v_proj.weight": [keys, hidden],
            f"{layer}.self_attn.o_proj.weight": [hidden, queries],
            f"{layer}.self_attn.q_norm.weight": [head_dim],
            f"{layer}.self_attn.k_norm.weight": [head_dim],
            f"{layer}.mlp.gate.weight": [config["num_experts"], hidden],
        }
        for e in range(config["num_experts"]):
            shapes |= {
                f"{layer}.mlp.experts.{e}.gate_proj.weight": [width, hidden],
                f"{layer}.mlp.experts.{e}.up_proj.weight": [width, hidden],
                f"{layer}.mlp.experts.{e}.down_proj.weight": [hidden, width],
            }
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def test_folder_is_at_most_24_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES


def test_tensors_are_those_that_the_config_describes(config: dict) -> None:
    assert config["tie_word_embeddings"]
    assert tensor_shapes() == expected_shapes(config)


def test_it_is_a_mixture_of_experts_with_grouped_queries(config: dict) -> None:
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] >= 8
    assert config["num_experts_per_tok"] >= 2
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 2048


@pytest.mark.parametrize(
    "text",
    [
        "It is a truth universally acknowledged, that a single man must be in want of a wife.",
        "  leading spaces,\ttabs\r\n\n\nand lines \n",
        "naïve — “quotes” 中文 مرحبا",
        "🙂👩‍👩‍👧 emoji",
        "\x00\x7f control",
        "def f(x): return {'a': 1_000} # 3.14",
        "",
    ],
)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """Four bytes of an emoji that never occurs in the training text become four tokens at most, none of them unknown."""
    assert len(tokenizer.encode("🦑").ids) == 4


def test_vocabulary_has_4096_entries(tokenizer: Tokenizer, config: dict) -> None:
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config["vocab_size"] == 4096
    assert sorted(tokenizer.get_vocab().values()) == list(range(4096))


def test_special_ids_agree(tokenizer: Tokenizer, config: dict, tokenizer_config: dict) -> None:
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert (
        tokenizer.token_to_id(tokenizer_config["eos_token"])
        == config["eos_token_id"]
        == generation["eos_token_id"][0]
    )
    assert tokenizer.token_to_id("<|endoftext|>") == config["bos_token_id"] == generation["eos_token_id"][1]
    assert (
        tokenizer.token_to_id(tokenizer_config["pad_token"])
        == config["pad_token_id"]
        == generation["pad_token_id"]
    )
    for token_id, token in tokenizer_config["added_tokens_decoder"].items():
        assert tokenizer.encode(token["content"]).ids == [int(token_id)]


def test_chat_template_renders(tokenizer: Tokenizer, tokenizer_config: dict) -> None:
    source = (FOLDER / "chat_template.jinja").read_text()
    assert source == tokenizer_config["chat_template"]
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer.encode(text).tokens
    assert tokens.count("<|im_start|>") == 3
    assert tokens.count("<|im_end|>") == 2
