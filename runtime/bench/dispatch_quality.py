"""What a narrower dispatch costs in text quality: `python -m runtime.bench.dispatch_quality FILE`.

Scores the first tokens of a text file with the embedded model on four virtual devices, once for each
`parallel.dispatch_dtype`, in bfloat16: perplexity per token, and how often the most probable token is another one.
"""

import argparse
import math
import os
import sys
from pathlib import Path

NUM_DEVICES, WINDOW, NUM_WINDOWS = 4, 256, 8


def score(tokens: list[int], dispatch_dtype: str) -> list[tuple[float, int]]:
    """(log probability, most probable token) of every token but the first of each window."""
    from runtime.bench.expert_skew import drive  # noqa: PLC0415 - brings JAX, which must see its flags first
    from runtime.config import parse_config  # noqa: PLC0415
    from runtime.engine.build import EMBEDDED_MODEL, load_engine  # noqa: PLC0415
    from runtime.model.architecture import load_architecture  # noqa: PLC0415
    from runtime.request import Request, SamplingParams  # noqa: PLC0415

    config = parse_config(
        {
            "kv_cache": {"kv_cache_size": "64MiB"},
            "ladder": {"decode_rows": [4], "prefill_tokens": [512], "cache_dir": "off"},
            "batch_processing": {"max_batch_size": 4, "base_batch_size": 4},
            "parallel": {"expert_parallel_size": NUM_DEVICES, "dispatch_dtype": dispatch_dtype},
        }
    )
    loaded = load_engine(config, EMBEDDED_MODEL, load_architecture(EMBEDDED_MODEL), (), WINDOW + 16)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    windows = [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(NUM_WINDOWS)]
    requests = [Request(f"window-{i}", tuple(window), params) for i, window in enumerate(windows)]
    found: list[tuple[float, int]] = []
    for collected in drive(loaded, requests):
        for scores in collected.prompt_logprobs.values():
            found += [(lp.logprob or 0.0, lp.top[0][0]) for lp in scores.logprobs]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.bench.dispatch_quality")
    parser.add_argument("file", type=Path, help="UTF-8 text that the model has not seen")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    )
    from runtime.engine.build import EMBEDDED_MODEL  # noqa: PLC0415
    from runtime.engine.tokenizer import HFTokenizer  # noqa: PLC0415

    tokens = HFTokenizer(EMBEDDED_MODEL).encode(args.file.read_text(encoding="utf-8"))
    if len(tokens) < WINDOW * NUM_WINDOWS:
        parser.error(f"{args.file} has {len(tokens)} tokens, {WINDOW * NUM_WINDOWS} are needed")
    wide = score(tokens, "model")
    for dtype in ("model", "fp8"):
        found = wide if dtype == "model" else score(tokens, dtype)
        perplexity = math.exp(-sum(value for value, _ in found) / len(found))
        other = sum(a[1] != b[1] for a, b in zip(found, wide, strict=True)) / len(found)
        print(
            f"{dtype:6} perplexity {perplexity:.4f} a token, another token first in {100 * other:.2f} % of {len(found)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
