"""Does XLA take experts from the host's memory inside a step, and copy ahead under a product? Asked for an H200, without one.

    .cache/aot-venv-0.11.2/bin/python -m runtime.engine.aot_residency [--ahead 1] [--phase prefill] [--json FILE]

Compiles a rung of a real model with part of its experts resident and reads in the scheduled program what stands between the
start and the end of each copy. GPUs that exist on paper have no memories that JAX could place an argument in, so the step
here says itself that its store is the host's; a server's arguments lie there from the beginning.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels.aot_cases import AotStep
from pallas_kernels.aot_target import compile_for, h200_mesh
from pallas_kernels.backend import choosing_for_hopper
from runtime.cache.kv_pool import abstract_kv_pool
from runtime.experts.weights import MoEParams
from runtime.ladder.aot_steps import (
    DECODE,
    DTYPE,
    FEW_LAYERS,
    MAX_PREFILL_ROWS,
    MIB,
    NUM_PAGES,
    PAGE_SIZE,
    PAGES_PER_ROW,
    QWEN3_30B_A3B,
)
from runtime.ladder.bucket import Bucket, prefill_bucket
from runtime.ladder.compiler import AbstractState, rung_step
from runtime.ladder.step import SCORE_CHUNK, StepShape, abstract_row_state
from runtime.model.architecture import from_hf_config
from runtime.model.params import Params, ResidentSlots, abstract_params
from runtime.model.sampling import abstract_sampling_state
from runtime.model.spec import map_specs, to_shape_structs

RESIDENT = 64  # of 128
PREFILL = prefill_bucket(512, PAGE_SIZE, MAX_PREFILL_ROWS)


@dataclass(frozen=True)
class Fetches:
    """Copies from the host's memory in one program. covered: asynchronous, with a product between start and done;
    uncovered: asynchronous, without. In loops and branches each counts once.
    """

    covered: int
    uncovered: int


def read_fetches(hlo: str) -> Fetches:
    """From the text of a compiled program. A copy is an asynchronous slice that reads memory space 5, the host's."""
    covered = uncovered = 0
    for computation in re.finditer(r"^(?:ENTRY )?%?\S+ \(.*?^}", hlo, re.M | re.S):
        lines = computation[0].splitlines()
        for i, line in enumerate(lines):
            start = re.match(r"\s*(?:ROOT )?%(\S+) = \(\(\S*S\(5\)\}.* (?:fusion|async)-start\(", line)
            if start is None:
                continue
            done = re.compile(rf"-done\(%{re.escape(start[1])}\)")
            end = next(j for j, other in enumerate(lines) if done.search(other))
            is_covered = any('custom_call_target="mosaic_gpu' in other for other in lines[i + 1 : end])
            covered, uncovered = covered + is_covered, uncovered + (not is_covered)
    return Fetches(covered, uncovered)


def resident_rung(bucket: Bucket, num_layers: int, num_staged: int) -> tuple[Any, tuple[Any, ...]]:
    """(step, abstract arguments) of a Qwen3-30B-A3B rung with half of its experts resident."""
    arch = from_hf_config(QWEN3_30B_A3B | {"num_hidden_layers": num_layers})
    shape = StepShape(bucket.rows, PAGE_SIZE, PAGES_PER_ROW, bucket.tokens)
    specs = abstract_params(arch, DTYPE, ResidentSlots(RESIDENT, num_staged))
    abstract = AbstractState(
        to_shape_structs(map_specs(lambda spec: replace(spec, in_host_memory=False), specs)),
        abstract_kv_pool(arch, NUM_PAGES, PAGE_SIZE, DTYPE),
        abstract_row_state(shape),
        abstract_sampling_state(shape.num_slots, arch.vocab_size),
        jax.ShapeDtypeStruct((bucket.tokens + SCORE_CHUNK, arch.hidden_size), DTYPE),
    )
    step, args = rung_step(arch, shape, bucket, abstract)
    return jax.jit(partial(_with_store_on_host, step), donate_argnums=range(1, len(args) - 1)), args


def _with_store_on_host(step: Any, params: Params, *rest: Any) -> Any:
    layers = list(params.layers)
    for i, layer in enumerate(layers):
        if isinstance(ffn := layer.ffn, MoEParams):
            store = ffn.store
            gate_up, down = (
                jax.device_put(w, jax.memory.Space.Host) for w in (store.w_gate_up, store.w_down)
            )
            layers[i] = replace(layer, ffn=replace(ffn, store=replace(store, w_gate_up=gate_up, w_down=down)))
    return step(replace(params, layers=tuple(layers)), *rest)


def _build(bucket: Bucket, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    return resident_rung(bucket, FEW_LAYERS, 1)


AOT_STEPS: tuple[AotStep, ...] = tuple(
    AotStep(
        name=f"qwen3-30b-a3b[{FEW_LAYERS} layers]/{bucket.name}/{RESIDENT} of 128 experts resident",
        build=partial(_build, bucket),
        max_temp_bytes=256 * MIB,
        dense_elements=QWEN3_30B_A3B["vocab_size"] * QWEN3_30B_A3B["hidden_size"],
        is_quick=False,
    )
    for bucket in (DECODE, PREFILL)
)


def main() -> int:
    """Status 1 where a copy that was to run ahead has no product to hide under."""
    parser = argparse.ArgumentParser(prog="python -m runtime.engine.aot_residency")
    parser.add_argument("--layers", type=int, default=FEW_LAYERS, choices=range(2, 49), metavar="N")
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--ahead", type=int, default=1, choices=range(9), help="experts fetched ahead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # no search for a GPU
    started = time.perf_counter()
    with choosing_for_hopper():
        rung = resident_rung(PREFILL if args.phase == "prefill" else DECODE, args.layers, args.ahead)
        compiled = compile_for(h200_mesh(), *rung)
    memory: Any = compiled.memory_analysis()
    found = read_fetches(compiled.as_text() or "")
    report = asdict(found) | {
        "wanted_covered": 2
        * args.ahead
        * (args.layers - 1),  # two matrices an expert, all layers but the first
        "temp_bytes": int(memory.temp_size_in_bytes),
        "host_temp_bytes": int(memory.host_temp_size_in_bytes),
        "layers": args.layers,
        "phase": args.phase,
        "ahead": args.ahead,
    }
    print(json.dumps(report), f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(found.covered < report["wanted_covered"])


if __name__ == "__main__":
    sys.exit(main())
