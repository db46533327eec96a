"""Does XLA put the exchange of one micro-batch under the products of the other? Reads its schedule for 8 H200, without one.

    .cache/aot-venv-0.11.2/bin/python -m runtime.engine.aot_overlap --layers 24 [--whole] [--phase prefill] [--json FILE]

Compiles a rung of a real model for a mesh of eight GPUs that exist on paper, and looks in the scheduled program which ops
stand between the start and the end of each all-to-all. Two things it cannot show: how long they take, and what the
exchange's own processors cost. That takes a trace on GPUs.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.xla_flags import check_overlap_flags, set_xla_flags

NUM_GPUS, PAGE_SIZE, NUM_PAGES, PAGES_PER_ROW = 8, 64, 1024, 64
DECODE_ROWS, PREFILL_TOKENS = 1024, 16384  # over all GPUs
_KERNEL_CALL = re.compile(r'custom_call_target="(?:mosaic_gpu|__cublas)')


@dataclass(frozen=True)
class Coverage:
    """All-to-alls of one program. covered: asynchronous, with a product between start and done."""

    covered: int
    uncovered: int
    synchronous: int

    @property
    def share(self) -> float:
        total = self.covered + self.uncovered + self.synchronous
        return self.covered / total if total else 0.0


def read_coverage(hlo: str) -> Coverage:
    """From the text of a compiled program, whose entry computation stands in the order in which it is issued."""
    ops, kernels = schedule(hlo), wrapped_kernels(hlo)
    covered = uncovered = synchronous = 0
    for i, (name, op, line) in enumerate(ops):
        is_start = op == "all-to-all-start" or (op == "async-start" and "all-to-all" in line)
        if op == "all-to-all":
            synchronous += 1
        if is_start:
            done = op.replace("start", "done")
            end = next(j for j, (_, other, text) in enumerate(ops) if other == done and f"%{name})" in text)
            has_product = any(is_product(o, text, kernels) for _, o, text in ops[i + 1 : end])
            covered, uncovered = covered + has_product, uncovered + (not has_product)
    return Coverage(covered, uncovered, synchronous)


def schedule(hlo: str) -> list[tuple[str, str, str]]:
    """(name, op, whole line) of the entry computation, or of the body of its largest loop where decode steps turn."""
    texts = re.findall(r"^(?:ENTRY )?%?\S+ \(.*?^}", hlo, re.M | re.S)
    text = max(texts, key=lambda t: t.count("all-to-all"))
    found = re.finditer(r"^\s*(?:ROOT )?%(\S+) = .*? ([a-z0-9\-]+)\(.*$", text, re.M)
    return [(m[1], m[2], m[0]) for m in found]


def wrapped_kernels(hlo: str) -> set[str]:
    """Computations that hold a kernel call: XLA folds the slice of a stacked weight and the call that reads it into one."""
    computations = re.finditer(r"^%(\S+) \(.*?^}", hlo, re.M | re.S)
    return {m[1] for m in computations if _KERNEL_CALL.search(m[0])}


def is_product(op: str, line: str, kernels: set[str]) -> bool:
    """Judged by what an op calls, never by its operands: a small fusion may read a value that is named gemm."""
    if op == "fusion":
        called = re.search(r"calls=%([^\s,]+)", line)
        return '"__triton' in line or (called is not None and called[1] in kernels)
    return op == "custom-call" and _KERNEL_CALL.search(line) is not None


def compile_rung(layers: int, phase: str, is_in_halves: bool) -> str:
    """The compiled program of a Qwen3-30B-A3B rung on eight GPUs, as text."""
    import jax  # noqa: PLC0415 - flags first

    from pallas_kernels.aot_target import compile_for, h200_mesh  # noqa: PLC0415
    from pallas_kernels.backend import choosing_for_hopper  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")  # no search for a GPU
    mesh = h200_mesh(NUM_GPUS)
    with choosing_for_hopper():
        compiled = compile_for(mesh, *mesh_rung(mesh, layers, phase, is_in_halves))
    return compiled.as_text() or ""


def mesh_rung(devices: Any, layers: int, phase: str, is_in_halves: bool) -> tuple[Any, tuple[Any, ...]]:
    """(step, abstract arguments) of a Qwen3-30B-A3B rung whose experts lie on the eight GPUs of a mesh."""
    import jax.numpy as jnp  # noqa: PLC0415 - flags first
    from jax.sharding import Mesh  # noqa: PLC0415

    from runtime.config import ParallelConfig  # noqa: PLC0415
    from runtime.engine.device_arrays import DeviceArrays, start_placement  # noqa: PLC0415
    from runtime.experts.exchange_kind import ExchangeKind  # noqa: PLC0415
    from runtime.ladder.aot_steps import QWEN3_30B_A3B  # noqa: PLC0415
    from runtime.ladder.bucket import Bucket  # noqa: PLC0415
    from runtime.ladder.mesh_steps import MeshSteps  # noqa: PLC0415
    from runtime.ladder.step import StepShape  # noqa: PLC0415
    from runtime.mesh import EXPERT_AXIS, TENSOR_AXIS, DeviceMesh  # noqa: PLC0415
    from runtime.model.architecture import from_hf_config  # noqa: PLC0415
    from runtime.schedule.plan import Phase  # noqa: PLC0415

    arch = from_hf_config(QWEN3_30B_A3B | {"num_hidden_layers": layers})
    # Room for all that can come in one round: a further round is a loop, and a GPU's host must look before each turn.
    parallel = ParallelConfig(expert_parallel_size=NUM_GPUS, capacity_factor=64.0, micro_batch_overlap="on")
    grid = devices.devices.reshape(NUM_GPUS, 1)
    mesh = DeviceMesh(Mesh(grid, (EXPERT_AXIS, TENSOR_AXIS)), arch)
    size = PREFILL_TOKENS if phase == "prefill" else DECODE_ROWS
    shape = StepShape(DECODE_ROWS // NUM_GPUS, PAGE_SIZE, PAGES_PER_ROW, PREFILL_TOKENS // NUM_GPUS)
    arrays = DeviceArrays(arch, shape, NUM_PAGES, jnp.bfloat16, mesh, start_placement(parallel, arch))
    steps, a = MeshSteps(mesh, shape, parallel, arrays.cuts()), arrays.abstract_state()
    rows = 64 if phase == "prefill" else DECODE_ROWS
    bucket = Bucket(Phase(phase), size, rows, ExchangeKind.ALL_TO_ALL, 2 if is_in_halves else 1)
    state = (a.params, a.pool, a.hidden) if phase == "prefill" else (a.params, a.pool, a.rows, a.sampling)
    return steps.rung(bucket), (*state, steps.abstract_packed(bucket))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.engine.aot_overlap")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--whole", action="store_true", help="one micro-batch, for comparison")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled program here")
    args = parser.parse_args()
    set_xla_flags()
    check_overlap_flags()
    started = time.perf_counter()
    hlo = compile_rung(args.layers, args.phase, not args.whole)
    if args.hlo:
        args.hlo.write_text(hlo, encoding="utf-8")
    found = read_coverage(hlo)
    report = asdict(found) | {
        "share": found.share,
        "layers": args.layers,
        "phase": args.phase,
        "halves": not args.whole,
    }
    print(json.dumps(report), f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
