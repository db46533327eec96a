"""`offline`: tokens/s of decode at several concurrencies and of prefill, beside the bound of this machine.

Random prompts that share nothing, greedy, end-of-text ignored, prefix cache off. Decode is taken from the difference
between a run of `output` new tokens and one of a single token over prompts of the same lengths, so that prefill drops
out; prefill is prompt tokens over the time of the single-token run. Each number is the median of the repeats.
"""

import argparse
import statistics
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from runtime.bench import limits as machine_limits
from runtime.bench import running
from runtime.bench.limits import MachineLimits
from runtime.bench.memory import PeakMemory
from runtime.bench.report import machine_stamp, print_table, progress_bar, spread_percent
from runtime.bench.roofline import Bound, ModelShape, decode_bound, load_shape, prefill_bound
from runtime.bench.running import ENDLESS_QUEUE, RunningEngine
from runtime.bench.workload import greedy_request, random_prompts

MIN_CONTEXT = 2048  # a server for shorter texts than this would not be a fair one
_KV_SLACK = 1.25
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """What will be measured; `prefill` holds (prompt length, prompts at once)."""

    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    prefill: tuple[tuple[int, int], ...]
    repeats: int

    @property
    def max_rows(self) -> int:
        return max([*self.concurrency, *(num for _, num in self.prefill)])

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max([self.input_len + self.output_len, *(length + 1 for length, _ in self.prefill)])

    @property
    def max_positions(self) -> int:
        """Largest number of KV positions held at once."""
        decode = max(self.concurrency, default=0) * (self.input_len + self.output_len)
        return max([decode, *(length * num + num for length, num in self.prefill)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running.add_arguments(parser)
    parser.add_argument(
        "--concurrency", type=_numbers, default=(1, 8, 32), help="requests at once, e.g. 1,8,32"
    )
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of the decode cases")
    parser.add_argument("--output", type=int, default=64, help="new tokens of the decode cases")
    parser.add_argument(
        "--prefill", type=_cases, default=(), help="prefill cases LENGTHxPROMPTS, e.g. 512x1,512x8"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-limits", action="store_true", help="do not measure the machine; no bounds then")
    parser.add_argument(
        "--peak-gflops",
        type=float,
        help="rate of products for the bound, where another library is known to beat XLA's",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The command `offline`."""
    plan = OfflinePlan(args.concurrency, args.input, args.output, args.prefill, args.repeats)
    if plan.output_len < 2 or plan.repeats < 1 or not plan.concurrency + plan.prefill:
        raise ValueError("offline needs --output of 2 or more, --repeats of 1 or more and at least one case")
    shape = load_shape(Path(args.model) if args.model else running.DEMO_MODEL)
    config = running.config_of(args, overrides_for(plan, shape))
    before = None if args.no_limits else machine_limits.probe_apart()
    with PeakMemory() as memory, running.open_engine(config, args.threads) as engine:
        result = measure(engine, plan)
    after = None if args.no_limits else machine_limits.probe_apart()
    if before is not None and after is not None:
        add_bounds(result, shape, mean_limits(before, after, args.peak_gflops))
    result |= {
        "machine": machine_stamp(),
        "limits_before": before and asdict(before),
        "limits_after": after and asdict(after),
        "peak_mib": round(memory.peak_bytes / _MIB),
    }
    show(result)
    return result


def overrides_for(plan: OfflinePlan, shape: ModelShape) -> dict[str, Any]:
    """Configuration that the method needs: no prefix cache, rows for the largest case, KV for it and a little more."""
    context = min(shape.max_context, max(MIN_CONTEXT, plan.longest))
    positions = _KV_SLACK * max(plan.max_positions, context)
    kv_mib = positions * shape.num_layers * 2 * shape.kv_dim * 2 / _MIB
    return {
        "kv_cache.enable_prefix_cache": False,
        "kv_cache.kv_cache_size": f"{max(16, round(kv_mib))}MiB",
        "model.max_context": context,
        "batch_processing.max_batch_size": plan.max_rows,
        # Throughput at a given size, whatever a step takes: the controller would keep slo.itl instead.
        "batch_processing.enable_dynamic_batch": False,
        "batch_processing.base_batch_size": plan.max_rows,
        "batch_processing.micro_batch_size": plan.max_rows,
        "batch_processing.max_micro_batch_size": plan.max_rows,
        **ENDLESS_QUEUE,
    }


def measure(engine: RunningEngine, plan: OfflinePlan) -> dict[str, Any]:
    """Run every case on a ready engine."""
    start = engine.snapshot()
    seed = 7
    _generate(engine, 2, min(32, plan.input_len), 4, seed=1)  # first touch of the weights
    decode, prefill = [], []
    with progress_bar() as progress:
        task = progress.add_task("offline", total=plan.repeats * len(plan.concurrency + plan.prefill))
        for num in plan.concurrency:
            rates, whole_rates = [], []
            progress.update(task, description=f"decode, {num} at once")
            for _ in range(plan.repeats):
                seed += 2
                single_s = _generate(engine, num, plan.input_len, 1, seed)
                whole_s = _generate(engine, num, plan.input_len, plan.output_len, seed + 1)
                if whole_s > single_s:  # or noise has swallowed the decode steps: no rate at all
                    rates.append(num * (plan.output_len - 1) / (whole_s - single_s))
                whole_rates.append(num * plan.output_len / whole_s)
                progress.advance(task)
            case = {"concurrency": num, "input": plan.input_len, "output": plan.output_len}
            decode.append(case | _rate(rates) | {"e2e_tokens_s": round(statistics.median(whole_rates), 1)})
        for length, num in plan.prefill:
            rates = []
            progress.update(task, description=f"prefill, {num} of {length}")
            for _ in range(plan.repeats):
                seed += 2
                rates.append(num * length / _generate(engine, num, length, 1, seed))
                progress.advance(task)
            prefill.append({"concurrency": num, "input": length} | _rate(rates))
    return {
        "command": "offline",
        "model": engine.model_name,
        "config": engine.config_stamp(),
        "first_rung_s": round(engine.first_rung_s, 2),
        "all_rungs_s": round(engine.all_rungs_s, 2),
        "decode": decode,
        "prefill": prefill,
        "late_compiles": engine.snapshot().late_compiles - start.late_compiles,
    }


def add_bounds(result: dict[str, Any], shape: ModelShape, limits: MachineLimits) -> None:
    """Give every case its bound on this machine and the share of it that was reached."""
    dtype = result["config"]["model"]["dtype"]
    for case in result["decode"]:
        context = case["input"] + case["output"] // 2
        bound = decode_bound(shape, case["concurrency"], context, limits, dtype)
        _add_bound(case, bound)
    for case in result["prefill"]:
        bound = prefill_bound(shape, case["input"], case["concurrency"], limits, dtype)
        _add_bound(case, bound)


def _add_bound(case: dict[str, Any], bound: Bound) -> None:
    rate = case["tokens_s"]
    case |= {"bound_tokens_s": bound.tokens_s, "limited_by": bound.limited_by}
    case["percent_of_bound"] = None if rate is None else round(100 * rate / bound.tokens_s, 1)


def mean_limits(before: MachineLimits, after: MachineLimits, peak_gflops: float | None) -> MachineLimits:
    """Limits of the run: the mean of both probes, and a known rate of products in place of XLA's own."""
    means = [statistics.fmean(pair) for pair in zip(astuple(before), astuple(after), strict=True)]
    return MachineLimits(means[0], peak_gflops or means[1], peak_gflops or means[2])


def show(result: dict[str, Any]) -> None:
    machine, limits = result["machine"], result["limits_before"]
    read = f", reads {limits['read_gbps']} then {result['limits_after']['read_gbps']} GB/s" if limits else ""
    columns = (
        "case",
        "tokens/s",
        "best",
        "spread %",
        "whole run tokens/s",
        "bound tokens/s",
        "of bound %",
        "bound by",
    )
    rows = []
    for phase in ("decode", "prefill"):
        for case in result[phase]:
            lengths = f"{case['input']} in" + (f" / {case['output']} out" if phase == "decode" else "")
            name = f"{phase} {case['concurrency']} x {lengths}"
            keys = ("tokens_s", "best_tokens_s", "spread_percent", "e2e_tokens_s", "bound_tokens_s", "percent_of_bound",
                    "limited_by")  # fmt: skip
            rows.append((name, *(case.get(key) for key in keys)))
    print_table(f"{result['model']} on {machine['cores']} cores, jax {machine['jax']}{read}", columns, rows)
    print(
        f"first rung {result['first_rung_s']} s, all rungs {result['all_rungs_s']} s, "
        f"peak memory {result['peak_mib']} MiB, late_compiles={result['late_compiles']}"
    )


def _generate(engine: RunningEngine, num: int, length: int, num_new: int, seed: int) -> float:
    """Seconds to get exactly num_new tokens for each of num new prompts."""
    prompts = random_prompts(num, length, engine.shape.vocab_size, seed)
    requests = [
        greedy_request(f"offline-{seed}-{num_new}-{i}", prompt, num_new) for i, prompt in enumerate(prompts)
    ]
    start_s = time.perf_counter()
    engine.client.submit(requests)
    engine.client.wait()
    seconds = time.perf_counter() - start_s
    for request_id, times in engine.client.take().items():
        if times.num_tokens != num_new:
            raise RuntimeError(
                f"{request_id}: {times.num_tokens} tokens instead of {num_new} ({times.error})"
            )
    return seconds


def _rate(rates: list[float]) -> dict[str, Any]:
    """None where every repeat was too short to measure; `repeats` counts those that were not."""
    if not rates:
        return {"tokens_s": None, "best_tokens_s": None, "spread_percent": None, "repeats": 0}
    return {
        "tokens_s": round(statistics.median(rates), 1),
        "best_tokens_s": round(max(rates), 1),
        "spread_percent": spread_percent(rates),
        "repeats": len(rates),
    }


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(",") if part)
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: numbers of 1 and more, for example 1,8,32")
    return values


def _cases(text: str) -> tuple[tuple[int, int], ...]:
    cases = []
    for part in filter(None, text.split(",")):
        length, separator, num = part.partition("x")
        if not (separator and length.isdigit() and num.isdigit() and int(length) and int(num)):
            raise argparse.ArgumentTypeError(f"{part}: write LENGTHxPROMPTS, for example 512x8")
        cases.append((int(length), int(num)))
    return tuple(cases)
