"""The real engine with part of its experts resident: text, hit rates and tokens/s beside the engine with all of them.

On a CPU the "host" and the "device" are one memory, so what is measured there is the cost of the loop that fetches, not
of a bus. Engines take turns, forth and back, and each figure is a ratio within its round.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.adaptive.decision import DecisionLog
from runtime.bench.driven import load
from runtime.bench.paired import abba_order, bootstrap_median, paired_ratios
from runtime.bench.report import console
from runtime.bench.workload import random_prompts
from runtime.config import EngineConfig, parse_config
from runtime.request import Request, SamplingParams

ROWS, PROMPT_LEN, NUM_TOKENS = 8, 48, 64


@dataclass(frozen=True)
class Variant:
    """resident 0: the engine without a store."""

    resident: int
    prefetch: int = 0

    @property
    def name(self) -> str:
        return "all" if self.resident == 0 else f"{self.resident} resident, {self.prefetch} ahead"


class Served:
    """One engine with its residency, driven in this thread."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        from runtime.engine.expert_residency import ExpertResidency  # noqa: PLC0415 - brings JAX

        loaded = load(config, folder)
        self.engine, self.scheduler, self.expert_bytes = loaded.engine, loaded.scheduler, 0
        self.engine.set_max_decode_steps(config.ladder.max_decode_steps)
        self.residency = None
        if loaded.residency is not None:
            self.residency = ExpertResidency(config, self.engine, loaded.residency, DecisionLog(64))
            self.expert_bytes = loaded.residency.expert_bytes
        while not self.engine.adopt_ready_rungs():
            time.sleep(0.01)
        if self.engine.compiler.first_error:
            raise RuntimeError(f"a rung failed to compile: {self.engine.compiler.first_error}")

    def serve(self, requests: list[Request]) -> tuple[list[list[int]], float]:
        """(output ids, seconds) of requests submitted at once; two launches are in flight, as in the server."""
        self.scheduler.clear_prefix_cache()
        start = time.perf_counter()
        sequences = [self.scheduler.add(request) for request in requests]
        for _ in self._turns():
            pass
        return [s.output_ids for s in sequences], time.perf_counter() - start

    def _turns(self) -> Iterator[None]:
        flying = deque[Any]()
        while not self.scheduler.is_idle:
            if self.residency is not None:
                self.residency.turn(time.monotonic())
            plan = self.scheduler.schedule() if len(flying) < 2 else None
            if plan is not None:
                flying.append(self.engine.launch(plan, {}))
            if flying and (plan is None or len(flying) == 2):
                step = flying.popleft()
                read = self.engine.collect(step)
                self.scheduler.collect(step.plan, read.result)
                if self.residency is not None and read.asleep is not None:
                    self.residency.on_step(read.expert_tokens, read.asleep, read.num_steps)
            yield

    def close(self) -> None:
        self.engine.compiler.shutdown()


def measure(folder: Path, num_rounds: int, dtype: str) -> dict[str, Any]:
    """Every variant against `all`, in mirrored rounds. Raises RuntimeError where a rung fails to compile."""
    from runtime.ladder.late_compiles import monitor  # noqa: PLC0415
    from runtime.model.architecture import load_architecture  # noqa: PLC0415

    arch = load_architecture(folder)
    variants = [Variant(0), *_variants(arch.num_experts)]
    engines = {}
    for variant in variants:
        with console.status(f"loading: {variant.name}"):
            engines[variant.name] = Served(_config(variant, dtype), folder)
    batches = [_requests(arch.vocab_size, number) for number in range(num_rounds + 1)]
    texts = {name: [engine.serve(batches[0])[0]] for name, engine in engines.items()}  # warm-up
    monitor.arm()
    late_before, seconds = monitor.num_late, {name: [] for name in engines}
    gc.disable()
    try:
        for number, order in enumerate(abba_order(list(engines), num_rounds), start=1):
            for name in order:
                text, took_s = engines[name].serve(batches[number])
                texts[name].append(text)
                seconds[name].append(took_s)
    finally:
        gc.enable()
        monitor.disarm()
        for engine in engines.values():
            engine.close()
    num_tokens = ROWS * NUM_TOKENS
    rates = {name: [num_tokens / s for s in found] for name, found in seconds.items()}
    return {
        "model": folder.name,
        "dtype": dtype,
        "experts": arch.num_experts,
        "top_k": arch.top_k,
        "requests_at_once": ROWS,
        "new_tokens_each": NUM_TOKENS,
        "rounds": num_rounds,
        "expert_bytes": max(engine.expert_bytes for engine in engines.values()),
        "late_compiles": monitor.num_late - late_before,
        "variants": [_figures(v, engines[v.name], rates, texts) for v in variants],
    }


def _figures(
    variant: Variant,
    engine: Served,
    rates: dict[str, list[float]],
    texts: dict[str, list[list[list[int]]]],
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": variant.name,
        "resident_experts": variant.resident,
        "prefetch_experts": variant.prefetch,
        "tokens_s": round(statistics.median(rates[variant.name]), 1),
        "speed_over_all": asdict(bootstrap_median(paired_ratios(rates[variant.name], rates["all"]))),
        "same_text": texts[variant.name] == texts["all"],
        "equal_tokens": round(float(np.mean(np.asarray(texts[variant.name]) == np.asarray(texts["all"]))), 4),
    }
    if engine.residency is None:
        return found
    status = engine.residency.status()
    ahead = status.prefetches_used + status.prefetches_unused
    wanted = status.prefetches_used + status.late_fetches
    return found | {
        "hit_rate": round(status.resident_rows / (status.resident_rows + status.asleep_rows), 4),
        "late_fetches": status.late_fetches,
        "prefetches_used": status.prefetches_used,
        "prefetches_unused": status.prefetches_unused,
        "prefetch_precision": round(status.prefetches_used / ahead, 4) if ahead else None,
        "prefetch_recall": round(status.prefetches_used / wanted, 4) if variant.prefetch and wanted else None,
        "changes": dict(status.changes),
    }


def _variants(num_experts: int) -> list[Variant]:
    shares = [max(1, num_experts * quarters // 4) for quarters in (4, 3, 2, 1)]
    return [
        Variant(resident, ahead)
        for resident in dict.fromkeys(shares)
        for ahead in (0, 2)
        if resident < num_experts or ahead == 0
    ]


def _config(variant: Variant, dtype: str) -> EngineConfig:
    return parse_config(
        {
            "model": {"dtype": dtype},
            "kv_cache": {"kv_cache_size": "16MiB"},
            "ladder": {"decode_rows": [ROWS], "prefill_tokens": [512]},
            "batch_processing": {"max_batch_size": ROWS, "base_batch_size": ROWS},
            "experts": {"resident_experts": variant.resident, "prefetch_experts": variant.prefetch},
        }
    )


def _requests(vocab_size: int, number: int) -> list[Request]:
    """Half greedy, half drawn; each batch begins with other words, so that the experts' traffic shifts a little."""
    return [
        Request(
            f"round-{number}-{i}",
            prompt,
            SamplingParams(
                max_tokens=NUM_TOKENS, temperature=0.8 * (i % 2), seed=1000 * number + i, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(random_prompts(ROWS, PROMPT_LEN, vocab_size, seed=number))
    ]
