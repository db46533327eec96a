"""The vllm side of benchmarks/peers.py: runs in vllm's own environment, so it imports nothing of ours.

The method is that of `runtime.bench offline`; result: {"rates": {case: tokens/s}, "start_s", "version"}.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

WARM_SEED, FIRST_SEED = 1, 7


class Generator:
    """Exactly num_new greedy tokens for prompts of random ids, timed."""

    def __init__(self, model: str, is_eager: bool) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415 - counted as start

        self._llm = LLM(
            model, dtype="bfloat16", max_model_len=2048, enforce_eager=is_eager, max_num_seqs=64,
            max_num_batched_tokens=4096, enable_prefix_caching=False, seed=0,
        )  # fmt: skip
        self._params = SamplingParams
        self._vocab_size: int = self._llm.llm_engine.model_config.get_vocab_size()

    def seconds(self, num: int, length: int, num_new: int, seed: int) -> float:
        draw = random.Random(seed)
        prompts: list[Any] = [
            {"prompt_token_ids": [draw.randrange(256, self._vocab_size - 64) for _ in range(length)]}
            for _ in range(num)
        ]
        params = self._params(temperature=0, max_tokens=num_new, ignore_eos=True)
        start_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        if any(len(output.outputs[0].token_ids) != num_new for output in outputs):
            raise RuntimeError("an answer has the wrong number of tokens")
        return seconds


def measure(generator: Generator, args: argparse.Namespace) -> dict[str, float]:
    """Medians by case; every shape runs once untimed, since this server compiles and tunes by shape."""
    seed = FIRST_SEED
    rates: dict[str, float] = {}
    for num in (int(part) for part in args.concurrency.split(",") if part):
        generator.seconds(num, args.input, 2, WARM_SEED)
        found = []
        for _ in range(args.repeats):
            seed += 2
            single_s = generator.seconds(num, args.input, 1, seed)
            whole_s = generator.seconds(num, args.input, args.output, seed + 1)
            if whole_s > single_s:  # or noise has swallowed the decode steps
                found.append(num * (args.output - 1) / (whole_s - single_s))
        if not found:
            raise RuntimeError(f"decode {num} x {args.input}: too short to measure; --output must be larger")
        rates[f"decode {num} x {args.input}"] = statistics.median(found)
    for part in filter(None, args.prefill.split(",")):
        length, num = map(int, part.split("x"))
        generator.seconds(num, length, 1, WARM_SEED)
        found = []
        for _ in range(args.repeats):
            seed += 2
            found.append(num * length / generator.seconds(num, length, 1, seed))
        rates[f"prefill {num} x {length}"] = statistics.median(found)
    return {case: round(rate, 1) for case, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    start_s = time.perf_counter()
    import vllm  # type: ignore[import-not-found]  # noqa: PLC0415 - its import is part of the start

    generator = Generator(args.model, args.eager)
    start_s = time.perf_counter() - start_s
    result = {"rates": measure(generator, args), "start_s": round(start_s, 1), "version": vllm.__version__}
    args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
