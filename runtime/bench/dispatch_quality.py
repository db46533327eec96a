"""What a narrower dispatch costs in text quality: the embedded model on four virtual devices, once for each type of tokens.

Scores windows of a text that the model has not seen (perplexity, how often another token is the most probable one) and
continues their beginnings greedily. The same model on one device says what rounding alone changes: sums in another order.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.driven import drive, load
from runtime.bench.report import console, machine_stamp, print_table
from runtime.bench.running import DEMO_MODEL
from runtime.config import parse_config
from runtime.request import Request, SamplingParams
from runtime.xla_flags import use_virtual_devices

NUM_DEVICES, WINDOW, NUM_WINDOWS = 4, 256, 16
PROMPT, CONTINUATION = 64, 48  # tokens of a window's beginning, and of its continuation
# (type of the model, devices, type in which tokens travel); the first of a type is what the others are held against
VARIANTS = (
    ("fp32", NUM_DEVICES, "model"),
    ("fp32", 1, "model"),
    ("fp32", NUM_DEVICES, "bf16"),
    ("fp32", NUM_DEVICES, "fp8"),
    ("bf16", NUM_DEVICES, "model"),
    ("bf16", 1, "model"),
    ("bf16", NUM_DEVICES, "fp8"),
)


@dataclass(frozen=True)
class Scored:
    """logprobs, best: of every token of the windows but the first of each, [windows, WINDOW - 1]. texts: continuations."""

    logprobs: np.ndarray
    best: np.ndarray
    texts: tuple[tuple[int, ...], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model has not seen")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from runtime.engine.tokenizer import HFTokenizer  # noqa: PLC0415 - JAX must see the flag first

    use_virtual_devices(NUM_DEVICES)
    tokens = HFTokenizer(DEMO_MODEL).encode(args.text.read_text(encoding="utf-8"))
    if len(tokens) < WINDOW * NUM_WINDOWS:
        raise ValueError(
            f"--text {args.text.name} has {len(tokens)} tokens, {WINDOW * NUM_WINDOWS} are needed"
        )
    stride = len(tokens) // NUM_WINDOWS
    windows = [tokens[i * stride : i * stride + WINDOW] for i in range(NUM_WINDOWS)]
    rows: list[dict[str, Any]] = []
    wide: dict[str, Scored] = {}
    for dtype, devices, dispatch in VARIANTS:
        console.print(f"{dtype} on {devices}, tokens as {dispatch}", highlight=False)
        found = score(windows, dtype, devices, dispatch)
        figures = compare(found, wide.setdefault(dtype, found))
        rows.append({"model": dtype, "devices": devices, "dispatch": dispatch, **figures})
    _print(rows)
    return {
        "machine": machine_stamp(),
        "settings": {
            "model": "demo-moe",
            "windows": NUM_WINDOWS,
            "window_tokens": WINDOW,
            "continuation_tokens": CONTINUATION,
            "not_run_on_a_gpu": True,
        },
        "variants": rows,
    }


def score(windows: Sequence[Sequence[int]], dtype: str, devices: int, dispatch: str) -> Scored:
    """One engine: prefill by all_to_all, decode by gather, so that both ways of the tokens are in the figures."""
    config = parse_config(
        {
            "model": {"dtype": dtype},
            "kv_cache": {"kv_cache_size": "64MiB", "enable_prefix_cache": False},
            "ladder": {"decode_rows": [16], "prefill_tokens": [512], "cache_dir": "off"},
            "batch_processing": {"max_batch_size": 16, "base_batch_size": 16},
            "parallel": {"expert_parallel_size": devices, "dispatch_dtype": dispatch},
        }
    )
    loaded = load(config, DEMO_MODEL, WINDOW + CONTINUATION)
    scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    writing = SamplingParams(max_tokens=CONTINUATION, temperature=0.0, ignore_eos=True)
    requests = [Request(f"score-{i}", tuple(window), scoring) for i, window in enumerate(windows)]
    requests += [Request(f"write-{i}", tuple(window[:PROMPT]), writing) for i, window in enumerate(windows)]
    scores: dict[str, list[tuple[float, int]]] = {f"score-{i}": [] for i in range(len(windows))}
    texts: dict[str, tuple[int, ...]] = {}
    for collected in drive(loaded, requests, texts):
        for name, part in collected.prompt_logprobs.items():
            scores[name] += [
                (lp.logprob, lp.top[0][0]) for lp in part.logprobs if lp.logprob is not None and lp.top
            ]
    pairs = np.array(list(scores.values()))
    continuations = tuple(texts[f"write-{i}"] for i in range(len(windows)))
    return Scored(pairs[..., 0], pairs[..., 1].astype(int), continuations)


def compare(found: Scored, wide: Scored) -> dict[str, float | int]:
    """Figures of one variant beside those of `wide`. agreed_tokens: of a continuation, before its first difference."""
    agreed = [_agreed(a, b) for a, b in zip(found.texts, wide.texts, strict=True)]
    return {
        "scored_tokens": found.logprobs.size,
        "perplexity": round(math.exp(-float(found.logprobs.mean())), 4),
        "mean_logprob_error": round(float(np.abs(found.logprobs - wide.logprobs).mean()), 5),
        "largest_logprob_error": round(float(np.abs(found.logprobs - wide.logprobs).max()), 4),
        "another_token_first_percent": round(100 * float((found.best != wide.best).mean()), 3),
        "same_continuations": sum(a == b for a, b in zip(found.texts, wide.texts, strict=True)),
        "continuations": len(found.texts),
        "agreed_tokens": round(float(np.mean(agreed)), 1),
    }


def _agreed(text: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), len(text))


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ("perplexity", "mean_logprob_error", "another_token_first_percent", "agreed_tokens")
    print_table(
        f"Tokens narrower on their way, {rows[0]['scored_tokens']} scored; held against the first row of a type",
        ("model", "devices", "dispatch", *(name.replace("_", " ") for name in columns), "same texts"),
        [
            (
                *(row[name] for name in ("model", "devices", "dispatch", *columns)),
                f"{row['same_continuations']} of {row['continuations']}",
            )
            for row in rows
        ],
    )
