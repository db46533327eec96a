"""The engine itself with dummy weights of a real shape: decode at 1 to 256 rows, prefill, cold and warm starts.

The kernels are those that the engine chooses by itself; a dry run has a tiny model on the CPU's own code. Prompts are
random, so routing is even. It starts in two processes: the second finds what the first compiled.
"""

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.gpu.options import Line, Lines, Options, failed, skipped

CONCURRENCY = (256, 64, 16, 1)
PREFILL = ((2048, 1), (2048, 4))
INPUT_LEN, OUTPUT_LEN, REPEATS = 128, 64, 2
PAGE_SIZE = 64
MAX_CONTEXT = 4096


def run(options: Options) -> Lines:
    """Cold start, then figures."""
    try:
        from runtime.bench import offline, running  # noqa: PLC0415 - the server's packages may be missing
        from runtime.bench.limits import MachineLimits  # noqa: PLC0415
        from runtime.bench.offline import OfflinePlan, measure  # noqa: PLC0415
        from runtime.bench.roofline import load_shape  # noqa: PLC0415
    except ImportError as error:
        yield skipped("engine", f"the server's packages are not all here: {error}")
        return
    folder = write_model(options)
    tiny = options.is_dry_run
    concurrency, prefill = ((2, 1), ((64, 1),)) if tiny else (CONCURRENCY, PREFILL)
    input_len, output_len = (16, 8) if tiny else (INPUT_LEN, OUTPUT_LEN)
    whole = OfflinePlan(concurrency, input_len, output_len, prefill, 1 if tiny else REPEATS)
    shape = load_shape(folder)
    config = engine_config(options, offline.overrides_for(whole, shape))
    limits = MachineLimits(options.bytes_per_s / 1e9, options.flops_per_s / 1e9)
    try:
        with running.open_engine(config) as engine:
            yield _start_line("cold start", engine)
            yield {"item": "products", "backend": _chosen_backend()}
            plans = [OfflinePlan((num,), input_len, output_len, (), whole.repeats) for num in concurrency]
            plans += [OfflinePlan((), input_len, output_len, (case,), whole.repeats) for case in prefill]
            for plan in plans:
                if not options.has_time:
                    yield skipped(f"engine {plan.concurrency or plan.prefill}", "out of time")
                    continue
                result = measure(engine, plan)
                offline.add_bounds(result, shape, limits)
                for phase in ("decode", "prefill"):
                    for case in result[phase]:
                        name = f"{phase} {case['concurrency']} x {case['input']}"
                        yield {"item": name, "late_compiles": result["late_compiles"], **case}
    except Exception as error:  # a failed load or a lost device ends this part, not the others
        yield failed("engine", error)


def run_warm_start(options: Options) -> Lines:
    """The same engine again, in this new process, with what is in the compile cache."""
    try:
        from runtime.bench import offline, running  # noqa: PLC0415 - as above
        from runtime.bench.offline import OfflinePlan  # noqa: PLC0415
        from runtime.bench.roofline import load_shape  # noqa: PLC0415
    except ImportError as error:
        yield skipped("warm start", f"the server's packages are not all here: {error}")
        return
    tiny = options.is_dry_run
    plan = OfflinePlan((2, 1), 16, 8, ((64, 1),), 1) if tiny else OfflinePlan(
        CONCURRENCY, INPUT_LEN, OUTPUT_LEN, PREFILL, REPEATS
    )  # fmt: skip
    try:
        config = engine_config(options, offline.overrides_for(plan, load_shape(write_model(options))))
        with running.open_engine(config) as engine:
            yield _start_line("warm start", engine)
    except Exception as error:  # as above
        yield failed("warm start", error)


def write_model(options: Options) -> Path:
    """A folder with nothing but a config.json: weights are drawn."""
    from runtime.ladder.aot_steps import QWEN3_30B_A3B  # noqa: PLC0415 - as above

    shape: dict[str, Any] = QWEN3_30B_A3B | {"num_hidden_layers": options.num_layers}
    if options.is_dry_run:
        shape |= {
            "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    folder = options.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def engine_config(options: Options, overrides: dict[str, Any]) -> Any:
    """Few rungs: each takes tens of seconds to compile the first time."""
    from runtime.bench.running import config_of  # noqa: PLC0415 - as above

    tiny = options.is_dry_run
    chosen = overrides | {
        "model.path": str(options.folder / "model"),
        "model.served_name": "qwen3-30b-a3b-shaped",
        "model.max_context": 256 if tiny else MAX_CONTEXT,
        "kv_cache.page_size": PAGE_SIZE,
        "kv_cache.kv_cache_size": "16MiB" if tiny else "16GiB",
        "ladder.decode_rows": [1, 2] if tiny else sorted(CONCURRENCY),
        "ladder.prefill_tokens": [64] if tiny else [2048],
        "ladder.max_prefill_tokens": 64 if tiny else 2048,
        "ladder.compile_workers": 2 if tiny else 8,
        "ladder.cache_dir": str(options.folder / "cache"),
        "slo.itl": "1000s",
    }
    return config_of(Namespace(config=None, model="", load_format="dummy", settings=[]), chosen)


def _start_line(item: str, engine: Any) -> Line:
    time.sleep(0.3)  # the engine renews its snapshot more often than this
    rungs = engine.snapshot().rungs
    return {
        "item": item,
        "first_rung_s": engine.first_rung_s,
        "all_rungs_s": engine.all_rungs_s,
        "compile_s": sum(rung.compile_s for rung in rungs),
        "rungs": len(rungs),
        "rungs_from_cache": sum(rung.from_cache for rung in rungs),
    }


def _chosen_backend() -> str:
    from pallas_kernels.backend import choose_backend  # noqa: PLC0415 - as above
    from pallas_kernels.expert_mlp.op import IMPLEMENTATIONS  # noqa: PLC0415

    return choose_backend(tuple(IMPLEMENTATIONS)).reason
