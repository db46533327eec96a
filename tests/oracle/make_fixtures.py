"""Writes tiny checkpoints and what transformers computes from them. Runs in the oracle environment (torch, transformers).

    python tests/oracle/make_fixtures.py                          the committed fixtures
    python tests/oracle/make_fixtures.py --random 50 --out DIR    random models for compare.py

Each folder holds config.json, safetensors, and expected.npz: prompt_i [n], logits_i [m, V] of the prompt's last m
positions in float32, greedy_i: the tokens that follow, margin_i: by how much each of them leads the next best.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cases import ARCHITECTURES, FIXTURES, random_case

FIXTURE_FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
PROMPT_LENGTHS = (5, 37, 150)
LOGIT_POSITIONS = 24
GREEDY_TOKENS = 64
# The best token leads the second by this much all along, so that rounding cannot change the text.
MIN_MARGIN = 5e-3
MAX_SEEDS = 40
GAINS = {"gate.weight": 3.0, "o_proj.weight": 1.5, "down_proj": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=FIXTURE_FOLDER)
    parser.add_argument(
        "--random", type=int, default=0, help="this many random models instead of the fixtures"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seeds", type=int, default=MAX_SEEDS, help="tries for a clear greedy text")
    parser.add_argument("--only", default="", help="one fixture by name")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    cases = {f"random-{i:03}": random_case(rng) for i in range(args.random)} or FIXTURES
    for name, case in cases.items():
        if args.only in ("", name):
            margin, seed = write_case(args.out / name, case, args.max_seeds)
            print(f"{name}: margin {margin:.4f} with seed {seed}", flush=True)


def write_case(folder: Path, case: dict[str, Any], max_seeds: int) -> tuple[float, int]:
    """One folder; the first seed whose greedy text is decided clearly, else the clearest."""
    store = case.get("_store", {})
    candidates = []
    for seed in range(max_seeds):
        model = build_model(case, seed, getattr(torch, store.get("dtype", "bfloat16")))
        expected, margin = run(model, seed)
        candidates.append((margin, seed, model, expected))
        candidates = [max(candidates, key=lambda c: c[0])]
        if margin >= MIN_MARGIN:
            break
    margin, seed, model, expected = candidates[0]
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, model, store)
    np.savez(folder / "expected.npz", **expected)
    return margin, seed


def build_model(case: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    """A model in float32 whose weights are exact in `dtype`; norms and biases are random too, so that none is idle."""
    values = {key: value for key, value in case.items() if not key.startswith("_")}
    model_type = values.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **values)
    config.architectures = [ARCHITECTURES[model_type]]
    config._attn_implementation = "eager"
    model = getattr(transformers, ARCHITECTURES[model_type])(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                value = 1 + 0.2 * noise
            elif weight.ndim == 1:
                value = 0.3 * noise
            elif "embed" in name and not config.tie_word_embeddings:
                value = noise
            else:
                gain = next((g for key, g in GAINS.items() if key in name), 1.0)
                value = gain * noise * (2.0 if "lm_head" in name else 1.0) / weight.shape[-1] ** 0.5
            weight.copy_(value.to(dtype).float())
    return model


@torch.no_grad()
def run(model: Any, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Logits and greedy text of the prompts, and the smallest lead of a greedy token."""
    rng = np.random.default_rng(seed)
    expected: dict[str, np.ndarray] = {}
    smallest = float("inf")
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(0, model.config.vocab_size, length)
        out = model(torch.tensor(prompt)[None], use_cache=True)
        expected[f"prompt_{i}"] = prompt.astype(np.int32)
        expected[f"logits_{i}"] = out.logits[0, -LOGIT_POSITIONS:].float().numpy()
        greedy, margins = [], []
        for _ in range(GREEDY_TOKENS):
            best = torch.topk(out.logits[0, -1], 2)
            margins.append(float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
            out = model(best.indices[None, :1], cache=out.cache, use_cache=True)
        expected[f"greedy_{i}"] = np.array(greedy, np.int32)
        expected[f"margin_{i}"] = np.array(margins, np.float32)
        smallest = min(smallest, *margins)
    return expected, smallest


def save(folder: Path, model: Any, store: dict[str, Any]) -> None:
    dtype = getattr(torch, store.get("dtype", "bfloat16"))
    options = {"save_original_format": False} if store.get("fused") else {}
    model.to(dtype).save_pretrained(folder, max_shard_size=store.get("shard_size", "1GB"), **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if store.get("published"):
        write_published_config(folder / "config.json")


def write_published_config(path: Path) -> None:
    """config.json as the hub's older checkpoints spell it: rope_theta and rope_scaling at the top, num_experts."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
