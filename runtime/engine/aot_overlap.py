"""Does XLA put the exchange of one micro-batch under the products of the other, and are they long enough? Reads its schedule
for 8 H200, without one.

    .cache/aot-venv-0.11.2/bin/python -m runtime.engine.aot_overlap --layers 24 [--phase prefill] [--model deepseek-v3-moe]
        [--context 4096] [--whole] [--json FILE]

Compiles a rung of a real model for a mesh of eight GPUs that exist on paper, looks in the scheduled program which ops stand
between the start and the end of each all-to-all, and compares estimated times (`overlap_times.py`). What they really are, and
what the exchange's own processors cost, takes a trace on GPUs.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pallas_kernels.arguments import whole_number_to
from runtime.engine.overlap_times import Load, Machine, read_windows, summarise
from runtime.xla_flags import check_overlap_flags, set_xla_flags

NUM_GPUS, PAGE_SIZE, NUM_PAGES, PAGES_PER_ROW = 8, 64, 1024, 64
DECODE_ROWS, PREFILL_TOKENS = 1024, 16384  # over all GPUs
TOP_K = 8  # of all models here
MODELS = ("qwen3-30b-a3b", "deepseek-v3-moe")


@dataclass(frozen=True)
class Rung:
    """What to compile: size counts rows or tokens of all GPUs."""

    model: str = MODELS[0]
    layers: int = 24
    phase: str = "decode"
    size: int = DECODE_ROWS
    is_in_halves: bool = True

    def load(self, context: float) -> Load:
        micro_batches = 2 if self.is_in_halves else 1
        return Load(context, self.size // NUM_GPUS // micro_batches * TOP_K, NUM_GPUS)


def compile_rung(rung: Rung) -> str:
    """The compiled program on eight GPUs, as text."""
    import jax  # noqa: PLC0415 - flags first

    from pallas_kernels.aot_target import compile_for, h200_mesh  # noqa: PLC0415
    from pallas_kernels.backend import choosing_for_hopper  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")  # no search for a GPU
    mesh = h200_mesh(NUM_GPUS)
    with choosing_for_hopper():
        compiled = compile_for(mesh, *mesh_rung(mesh, rung))
    return compiled.as_text() or ""


def mesh_rung(devices: Any, rung: Rung) -> tuple[Any, tuple[Any, ...]]:
    """(step, abstract arguments) of a rung whose experts lie on the eight GPUs of a mesh."""
    import jax.numpy as jnp  # noqa: PLC0415 - flags first
    from jax.sharding import Mesh  # noqa: PLC0415

    from runtime.config import ParallelConfig  # noqa: PLC0415
    from runtime.engine.device_arrays import DeviceArrays, start_placement  # noqa: PLC0415
    from runtime.experts.exchange_kind import ExchangeKind  # noqa: PLC0415
    from runtime.ladder.aot_steps import DEEPSEEK_V3_MOE, QWEN3_30B_A3B  # noqa: PLC0415
    from runtime.ladder.bucket import Bucket  # noqa: PLC0415
    from runtime.ladder.compiler import rung_step  # noqa: PLC0415
    from runtime.ladder.mesh_steps import MeshSteps  # noqa: PLC0415
    from runtime.ladder.step import StepShape  # noqa: PLC0415
    from runtime.mesh import EXPERT_AXIS, TENSOR_AXIS, DeviceMesh  # noqa: PLC0415
    from runtime.model.architecture import from_hf_config  # noqa: PLC0415
    from runtime.schedule.plan import Phase  # noqa: PLC0415

    configs: dict[str, dict[str, Any]] = dict(zip(MODELS, (QWEN3_30B_A3B, DEEPSEEK_V3_MOE), strict=True))
    arch = from_hf_config(configs[rung.model] | {"num_hidden_layers": rung.layers})
    # Room for all that can come in one round: a further round is a loop, and a GPU's host must look before each turn.
    parallel = ParallelConfig(expert_parallel_size=NUM_GPUS, capacity_factor=64.0, micro_batch_overlap="on")
    grid = devices.devices.reshape(NUM_GPUS, 1)
    mesh = DeviceMesh(Mesh(grid, (EXPERT_AXIS, TENSOR_AXIS)), arch)
    is_prefill = rung.phase == "prefill"
    shape = StepShape(
        num_slots=max(DECODE_ROWS, rung.size) // NUM_GPUS,
        page_size=PAGE_SIZE,
        pages_per_row=PAGES_PER_ROW,
        max_prefill_tokens=max(PREFILL_TOKENS, rung.size) // NUM_GPUS,
    )
    arrays = DeviceArrays(arch, shape, NUM_PAGES, jnp.bfloat16, mesh, start_placement(parallel, arch))
    rows = 64 if is_prefill else rung.size
    bucket = Bucket(
        Phase(rung.phase), rung.size, rows, ExchangeKind.ALL_TO_ALL, 2 if rung.is_in_halves else 1
    )
    steps = MeshSteps(mesh, shape, parallel, arrays.cuts())
    return rung_step(arch, shape, bucket, arrays.abstract_state(), steps)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.engine.aot_overlap")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=whole_number_to(128), default=24)
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument(
        "--size", type=whole_number_to(1 << 17), help="rows or tokens on all eight GPUs, a multiple of 1024"
    )
    parser.add_argument(
        "--context", type=whole_number_to(1 << 20), nargs="+", default=[1024],
        help="keys that a token attends to, on average; several to see where it begins to pay",
    )  # fmt: skip
    parser.add_argument("--whole", action="store_true", help="one micro-batch, for comparison")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled program here")
    args = parser.parse_args()
    size = args.size or (PREFILL_TOKENS if args.phase == "prefill" else DECODE_ROWS)
    if size % 1024:
        parser.error(f"--size is {size}; it must be a multiple of 1024")
    set_xla_flags()
    check_overlap_flags()
    started = time.perf_counter()
    rung = Rung(args.model, args.layers, args.phase, size, not args.whole)
    hlo = compile_rung(rung)
    if args.hlo:
        args.hlo.write_text(hlo, encoding="utf-8")
    machine = Machine()
    report = {
        "machine": "eight H200 that exist on paper; times estimated at these rates, nothing was run",
        "jax": version("jax"),
        "commit": _commit(),
        "rung": asdict(rung),
        "rates": asdict(machine),
        "by_context": {
            context: summarise(read_windows(hlo, rung.load(context), machine)) for context in args.context
        },
    }
    print(json.dumps(report, indent=1), f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
