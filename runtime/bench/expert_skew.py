"""The skew case: 80 % of all rows go to 3 experts of each layer, through the real engine on several devices.

The model is made for it: a token's embedding says which experts it goes to, large enough that no layer changes that, and
every layer names the experts differently. What is measured is rows of each device in each step; on virtual devices, which
share the machine's cores, rows and text are real and time is not.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from runtime.adaptive.decision import DecisionLog
from runtime.bench.driven import drive, load
from runtime.config import EngineConfig, parse_config
from runtime.request import Request, SamplingParams

HOT_EXPERTS, HOT_SHARE = 3, 0.8
LAYERS, EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH, VOCABULARY = 4, 32, 2, 64, 16, 512
LOUD = 100.0  # embeddings against what layers add to them


@dataclass(frozen=True)
class SkewRun:
    """rows: of each device's experts, [steps, L, devices]. expert_tokens: [L, E], all steps. texts: output ids of each
    request. num_moves: applied."""

    rows: np.ndarray
    expert_tokens: np.ndarray
    texts: tuple[tuple[int, ...], ...]
    num_moves: int

    @property
    def critical_rows(self) -> int:
        """Rows that the busiest device computes, over all layers and steps: what a step waits for."""
        return int(self.rows.max(axis=2).sum())

    @property
    def hot_share(self) -> float:
        """Share of the rows that falls on the busiest three experts of each layer."""
        return float(np.sort(self.expert_tokens, axis=1)[:, -HOT_EXPERTS:].sum() / self.expert_tokens.sum())

    @property
    def least_rows(self) -> float:
        """The same if every device computed equally many."""
        return float(self.rows.mean(axis=2).sum())


def compare_skew(
    num_devices: int = 8, spare_slots: int = 2, num_requests: int = 256, num_tokens: int = 48
) -> dict[str, Any]:
    """Both runs in figures. Needs `num_devices` devices: set XLA_FLAGS before JAX starts, see docs/expert_parallel.md.

    spare_slots: expert slots of each device beyond its share. `critical_path_gain` is modelled: a row costs the same
    whatever device computes it, and nothing else takes time.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_skewed_model(Path(folder))
        runs = {
            name: run_skew(Path(folder), num_devices, spare_slots, num_requests, num_tokens, is_balanced)
            for name, is_balanced in (("without", False), ("with", True))
        }
    without, balanced = runs["without"], runs["with"]
    gain, bound = (without.critical_rows / r for r in (balanced.critical_rows, balanced.least_rows))
    return {
        "devices": num_devices,
        "slots_per_device": EXPERTS // num_devices + spare_slots,
        "hot_share": without.hot_share,
        "steps": len(balanced.rows),
        "critical_rows_without": without.critical_rows,
        "critical_rows_with": balanced.critical_rows,
        "critical_path_gain": gain,
        "critical_path_gain_bound": bound,
        "fraction_of_bound": gain / bound,
        "ratio_last_half": _ratio(balanced.rows[len(balanced.rows) // 2 :]),
        "moves": balanced.num_moves,
        "same_text": without.texts == balanced.texts,
        "is_modelled": True,
    }


def run_skew(
    folder: Path, num_devices: int, spare_slots: int, num_requests: int, num_tokens: int, is_balanced: bool
) -> SkewRun:
    """Serve requests of random tokens to their end, with or without the balancer. One step is one second of its clock."""
    from runtime.engine.balancing import ExpertBalancing  # noqa: PLC0415 - brings JAX, which must see its flags first

    config = skew_config(num_devices, spare_slots, num_requests, 0.5 if is_balanced else 0.0)
    loaded = load(config, folder)
    mover = loaded.mover
    assert mover is not None
    rows: list[np.ndarray] = []  # one entry a step, which is a second of the balancer's clock
    texts: dict[str, tuple[int, ...]] = {}
    expert_tokens = np.zeros((LAYERS, EXPERTS), np.int64)
    requests = _requests(num_requests, num_tokens)
    balancing = None
    if is_balanced:
        balancing = ExpertBalancing(config, mover, DecisionLog(1024), lambda: float(len(rows)))

    def between() -> None:
        if balancing is not None:
            balancing.turn(float(len(rows)), 1.0)

    for collected in drive(loaded, requests, texts, between):
        rows.append(collected.device_rows)
        expert_tokens += collected.expert_tokens
        if balancing is not None:
            balancing.on_step(collected.expert_tokens, collected.device_rows, 1, 0.1)
    return SkewRun(
        np.array(rows), expert_tokens, tuple(texts[r.request_id] for r in requests), mover.num_applied
    )


def skew_config(
    num_devices: int, spare_slots: int, num_rows: int, balance_weight: float = 0.5
) -> EngineConfig:
    return parse_config(
        {
            "model": {"dtype": "fp32"},
            "kv_cache": {"kv_cache_size": "8MiB", "page_size": 4},
            "ladder": {
                "decode_rows": [num_rows],
                "prefill_tokens": [64 * num_devices],
                "max_decode_steps": 1,
                "cache_dir": "off",
            },
            "batch_processing": {
                "max_batch_size": num_rows,
                "base_batch_size": num_rows,
                "expert_balance_weight": balance_weight,
            },
            "parallel": {
                "expert_parallel_size": num_devices,
                "redundant_experts": spare_slots * num_devices,
                "exchange": "gather",
                "moves_per_step": 8,
            },
        }
    )


def write_skewed_model(folder: Path, seed: int = 0) -> None:
    """A Qwen3-MoE checkpoint whose routing is known: see the module's first lines."""
    rng = np.random.default_rng(seed)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_WIDTH,
        "intermediate_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    embedding = draw(VOCABULARY, WIDTH)
    for token in range(VOCABULARY):
        is_hot = token < HOT_SHARE * VOCABULARY
        first, second = rng.choice(
            HOT_EXPERTS if is_hot else np.arange(HOT_EXPERTS, EXPERTS), 2, replace=False
        )
        embedding[token, first] += LOUD
        embedding[token, second] += 0.9 * LOUD
    ones = {name: np.ones(WIDTH, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": draw(VOCABULARY, WIDTH)}
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": value for name, value in ones.items()}
        for name, out in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = draw(out, WIDTH)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = np.ones(16, np.float32)
        router = np.zeros((EXPERTS, WIDTH), np.float32)
        # The hot ones lie on different devices at the start, as they would by chance.
        router[np.arange(EXPERTS) * 5 % EXPERTS, np.arange(EXPERTS)] = 1
        tensors[f"{prefix}.mlp.gate.weight"] = np.roll(router, 3 * layer, axis=0)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", (16, WIDTH)),
                ("up_proj", (16, WIDTH)),
                ("down_proj", (WIDTH, 16)),
            ):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = draw(*shape)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _ratio(rows: np.ndarray) -> float:
    """Busiest device over the mean, in rows."""
    return float(rows.max(axis=2).sum() / rows.mean(axis=2).sum())


def _requests(num: int, num_tokens: int) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            f"skew-{i}",
            tuple(rng.integers(0, VOCABULARY, 16).tolist()),
            SamplingParams(max_tokens=num_tokens, temperature=2.0, seed=i, ignore_eos=True),
        )
        for i in range(num)
    ]


if __name__ == "__main__":
    print(json.dumps(compare_skew(int(sys.argv[1]))))
