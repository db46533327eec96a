"""`python -m pallas_kernels.aot --json FILE`: compile every GPU kernel for an H200 without a GPU, and hold it to budgets.

Exit status 1 when a budget is broken. Where the CUDA compiler's wheels are missing it runs in the environment that
`.ci/aot` made, and where there is none it says so, writes {"skipped": reason} and exits with 0.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.aot_cases import all_cases, all_steps
from pallas_kernels.aot_compile import Outcome, Task
from pallas_kernels.aot_target import missing_wheels
from pallas_kernels.aot_workers import compile_in_processes
from pallas_kernels.arguments import seconds_between, whole_number_to

ROOT = Path(__file__).parents[1]
MAX_JOBS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, compiles, prints a table, writes JSON."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    _set_flags()
    missing = missing_wheels()
    if missing is not None:
        python = _environment()
        if python is not None:
            command = [str(python), "-m", "pallas_kernels.aot", *arguments]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 (our interpreter)
        print(f"skipped: {missing}")
        _write(options.json, {"skipped": missing, "kernels": [], "steps": []})
        return 0
    tasks = _tasks(options)
    if not tasks:
        print(f"nothing has {options.only!r} in its name", file=sys.stderr)
        return 2
    return _run(tasks, options)


def _set_flags() -> None:
    """The server's XLA flags, where it is here: the worker processes inherit them."""
    if importlib.util.find_spec("runtime") is not None:
        importlib.import_module("runtime.xla_flags").set_xla_flags()


def _tasks(options: argparse.Namespace) -> list[Task]:
    """Steps first: they take longest, and should not be what the last process is left with."""
    module = options.cases
    steps = [] if options.no_steps else all_steps(options.only, module, only_quick=options.quick)
    cases = all_cases(options.only, module)
    return [Task("step", s.name, module) for s in steps] + [Task("case", c.name, module) for c in cases]


def _run(tasks: list[Task], options: argparse.Namespace) -> int:
    started = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    for task, outcome in compile_in_processes(tasks, options.jobs, options.timeout):
        outcomes[task.name] = outcome
        _show(outcome)
    in_order = [outcomes[task.name] for task in tasks]
    broken = [sentence for outcome in in_order for sentence in outcome.broken]
    report = {
        "jax": jax.__version__,
        "target": "NVIDIA H200, sm_90a",
        "seconds": round(time.perf_counter() - started, 1),
        "kernels": [asdict(kernel) for outcome in in_order for kernel in outcome.kernels],
        "steps": [asdict(step) for outcome in in_order for step in outcome.steps],
        "broken": broken,
    }
    _write(options.json, report)
    for sentence in broken:
        print(f"over budget: {sentence}")
    kernels, steps = len(report["kernels"]), len(report["steps"])
    print(f"{kernels} kernels, {steps} steps, {len(broken)} over budget, {report['seconds']} s")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases and steps whose name has this text in it"
    )
    parser.add_argument(
        "--cases", metavar="MODULE", help="AOT_CASES and AOT_STEPS of this module and no others"
    )
    parser.add_argument("--no-steps", action="store_true", help="kernels only")
    parser.add_argument("--quick", action="store_true", help="steps of two layers only")
    parser.add_argument(
        "--jobs", type=whole_number_to(MAX_JOBS), default=min(4, os.cpu_count() or 1), metavar="N",
        help="processes, 1 to 64; each takes up to 3 GiB (default: one a core, at most 4)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds_between(1), default=240.0, metavar="S",
        help="processor time for one case or step (default: 240)",
    )  # fmt: skip
    return parser


def _show(outcome: Outcome) -> None:
    for k in outcome.kernels:
        print(
            f"{k.name:64} {k.registers:4} registers {k.spill_bytes:5} spilled {k.shared_bytes:7} shared "
            f"{k.wgmma:4} wgmma {k.tma:3} tma {k.seconds:6.2f} s",
            flush=True,
        )
    for s in outcome.steps:
        print(
            f"{s.name:64} {s.devices} GPUs {s.kernels} kernels {s.temp_bytes / 2**20:7.1f} MiB temporary, collectives "
            f"{s.exposed_collectives} exposed {s.overlapped_collectives} overlapped {s.seconds:6.2f} s",
            flush=True,
        )


def _environment() -> Path | None:
    """The interpreter that `.ci/aot` made, of the oldest version of jax: that is its default."""
    return min(ROOT.glob(".cache/aot-venv-*/bin/python"), default=None, key=str)


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
