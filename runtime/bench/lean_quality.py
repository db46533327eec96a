"""What leaning between experts costs in text quality and gains in balance.

Scores windows of a text file with the embedded model, its experts on virtual devices, once for each strength of
`batch_processing.expert_lean_between`. The bias follows the loads as it does in a server, from what was counted so far; the
windows before the scored ones are there for it to settle. No expert moves and none has a copy, so that leaning alone acts.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bench.driven import drive, load
from runtime.bench.report import machine_stamp, print_table
from runtime.bench.running import DEMO_MODEL
from runtime.xla_flags import use_virtual_devices

if TYPE_CHECKING:
    from runtime.engine.loaded import Loaded

WINDOW = 256  # tokens
SETTLING, SCORED = 48, 80  # windows
STRENGTHS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class LeanScore:
    """perplexity: per token. other_token_first: share of positions whose most probable token is another than without leaning.
    launches: those after the settling tokens, of which both figures of rows are. imbalance: (max - mean) / mean of the devices'
    rows over these launches, mean over layers. critical_rows: of the busiest device, summed over layers and launches, over the
    mean device's: what a launch waits for."""

    strength: float
    tokens: int
    launches: int
    perplexity: float
    other_token_first: float
    imbalance: float
    critical_rows: float


def compare(tokens: Sequence[int], strengths: Sequence[float], num_devices: int) -> list[LeanScore]:
    """One row a strength, the first of which is 0. Needs so many devices: set XLA_FLAGS before JAX starts."""
    windows = [tuple(tokens[i * WINDOW : (i + 1) * WINDOW]) for i in range(SETTLING + SCORED)]
    config = lean_config(0.0, num_devices)
    loaded = load(config, DEMO_MODEL, WINDOW + 16)
    found: list[LeanScore] = []
    plain: list[int] = []
    for strength in strengths:
        scores, rows = score(loaded, windows, SETTLING, strength, num_devices)
        first = [best for _, best in scores]
        plain = plain or first
        found.append(LeanScore(strength, **summarise(scores, plain, rows)))
    return found


def summarise(scores: Sequence[tuple[float, int]], plain: Sequence[int], rows: np.ndarray) -> dict[str, Any]:
    """scores: (log probability, most probable token) by position; plain: the latter without leaning; rows: [launches, L, D]."""
    by_device = rows.sum(axis=0)
    return {
        "tokens": len(scores),
        "launches": len(rows),
        "perplexity": round(math.exp(-sum(value for value, _ in scores) / len(scores)), 4),
        "other_token_first": round(
            sum(best != other for (_, best), other in zip(scores, plain, strict=True)) / len(scores), 5
        ),
        "imbalance": round(float((by_device.max(axis=1) / by_device.mean(axis=1) - 1).mean()), 4),
        "critical_rows": round(float(rows.max(axis=2).sum() / rows.mean(axis=2).sum()), 4),
    }


def lean_config(strength: float, num_devices: int) -> Any:
    from runtime.config import parse_config  # noqa: PLC0415

    return parse_config(
        {
            "kv_cache": {"kv_cache_size": "64MiB", "enable_prefix_cache": False},
            "ladder": {"decode_rows": [8], "prefill_tokens": [2 * WINDOW], "cache_dir": "off"},
            "batch_processing": {
                "max_batch_size": 8,
                "base_batch_size": 8,
                "expert_lean_between": strength,
                "dynamic_adjust_window": "1s",  # a launch
            },
            "parallel": {"expert_parallel_size": num_devices, "micro_batch_overlap": "off"},
        }
    )


def score(
    loaded: "Loaded",
    windows: Sequence[tuple[int, ...]],
    num_settling: int,
    strength: float,
    num_devices: int,
) -> tuple[list[tuple[float, int]], np.ndarray]:
    """Scores of the tokens of all windows but the first `num_settling`, in order, and rows [launches, L, D] of the launches
    after those that computed as many tokens as the first windows have."""
    from runtime.adaptive.decision import DecisionLog  # noqa: PLC0415 - JAX, as above
    from runtime.engine.balancing import ExpertBalancing  # noqa: PLC0415
    from runtime.request import Request, SamplingParams  # noqa: PLC0415

    assert loaded.mover is not None
    rows: list[np.ndarray] = []  # one entry a launch, which is a second of the balancing's clock
    num_tokens: list[int] = []  # of each launch
    balancing = ExpertBalancing(
        lean_config(strength, num_devices), loaded.mover, DecisionLog(16), lambda: float(len(rows))
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    requests = [Request(f"{strength}-{i}", window, params) for i, window in enumerate(windows)]
    by_request: dict[str, list[tuple[float, int]]] = {}
    for collected in drive(loaded, requests, between=lambda: balancing.turn(float(len(rows)), None)):
        balancing.on_step(collected.expert_tokens, collected.device_rows, 1, 0.1)
        rows.append(collected.device_rows)
        num_tokens.append(sum(len(scores.logprobs) for scores in collected.prompt_logprobs.values()))
        for name, scores in collected.prompt_logprobs.items():
            by_request.setdefault(name, []).extend(
                (lp.logprob or 0.0, lp.top[0][0]) for lp in scores.logprobs
            )
    if strength > 0:
        loaded.mover.set_lean(
            np.zeros((loaded.mover.placement.num_layers, loaded.mover.placement.num_experts), np.float32)
        )
    # The first token of a window has no score.
    first = num_launches(num_tokens, sum(len(window) - 1 for window in windows[:num_settling]))
    scored = [pair for request in requests[num_settling:] for pair in by_request[request.request_id]]
    return scored, np.array(rows[first:])


def num_launches(tokens: Sequence[int], num_needed: int) -> int:
    """How many launches, of so many tokens each, it takes until `num_needed` tokens are computed."""
    return int(np.searchsorted(np.cumsum([0, *tokens]), num_needed))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the model has not seen")
    parser.add_argument("--devices", type=int, choices=(2, 4, 8), default=8, help="default %(default)s")
    parser.add_argument("--strengths", help="comma-separated, in [0, 0.5]; 0 is always there")


def run(args: argparse.Namespace) -> dict[str, Any]:
    strengths = STRENGTHS if args.strengths is None else read_strengths(args.strengths)
    use_virtual_devices(args.devices)
    from runtime.engine.tokenizer import HFTokenizer  # noqa: PLC0415 - JAX, as above

    tokens = HFTokenizer(DEMO_MODEL).encode(args.text.read_text(encoding="utf-8"))
    needed = WINDOW * (SETTLING + SCORED)
    if len(tokens) < needed:
        raise ValueError(f"--text {args.text.name} has {len(tokens)} tokens, {needed} are needed")
    found = compare(tokens, strengths, args.devices)
    print_table(
        f"Leaning between experts, embedded model on {args.devices} virtual devices, {found[0].launches} launches",
        ("strength", "perplexity", "another token first", "imbalance", "rows of the busiest device"),
        [
            (s.strength, s.perplexity, f"{100 * s.other_token_first:.2f} %", s.imbalance, s.critical_rows)
            for s in found
        ],
    )
    return {
        "machine": machine_stamp(),
        "settings": {
            "devices": args.devices,
            "window_tokens": WINDOW,
            "settling_windows": SETTLING,
            "scored_windows": SCORED,
            "not_run_on_a_gpu": True,
        },
        "strengths": [asdict(row) for row in found],
    }


def read_strengths(text: str) -> tuple[float, ...]:
    """Rising, 0 first. ValueError for what is no strength."""
    try:
        values = {float(part) for part in text.split(",")}
    except ValueError:
        raise ValueError(f"--strengths must be numbers with commas between, not {text!r}") from None
    if not all(0 <= value <= 0.5 for value in values) or len(values) > 32:
        raise ValueError(f"--strengths must be at most 32 numbers in [0, 0.5], not {text!r}")
    return tuple(sorted(values | {0.0}))
