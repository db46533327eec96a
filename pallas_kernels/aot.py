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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.aot_cases import AotCase, AotStep
from pallas_kernels.aot_report import KernelReport, read_reports
from pallas_kernels.aot_target import compile_for, h200_mesh, missing_wheels
from pallas_kernels.backend import choosing_for_hopper

ROOT = Path(__file__).parents[1]
CASES_OF = (
    "pallas_kernels.grouped_matmul.cases",
    "pallas_kernels.mla_attention.cases",
    "pallas_kernels.paged_attention.cases",
    "pallas_kernels.prefill_attention.cases",
    "pallas_kernels.quantized_matmul.cases",
    "pallas_kernels.router.cases",
)
STEPS_OF = "runtime.ladder.aot_steps"  # by name: kernels stand alone, and the whole server adds its steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, compiles, prints a table, writes JSON."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
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
    jax.config.update("jax_platforms", "cpu")  # no search for a GPU, no checks of CUDA libraries
    broken: list[str] = []
    kernels = [report for case in all_cases(options.only) for report in _compile_case(case, broken)]
    todo = [] if options.no_steps else all_steps(options.only)
    steps = [report for step in todo for report in _compile_step(step, broken)]
    versions = {"jax": jax.__version__, "target": "NVIDIA H200, sm_90a"}
    _write(
        options.json, {**versions, "kernels": [asdict(k) for k in kernels], "steps": steps, "broken": broken}
    )
    for sentence in broken:
        print(f"over budget: {sentence}")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases and steps whose name has this text in it"
    )
    parser.add_argument("--no-steps", action="store_true", help="kernels only")
    return parser


def all_cases(only: str = "") -> list[AotCase]:
    """The cases of every op that is there. Raises ValueError for a name that two cases have."""
    found = [case for name in CASES_OF if _exists(name) for case in importlib.import_module(name).AOT_CASES]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two ahead-of-time cases are called {twice[0]!r}")
    return [case for case in found if only in case.name]


def all_steps(only: str = "") -> list[AotStep]:
    """The steps of whole models, where the server's packages are installed."""
    steps = importlib.import_module(STEPS_OF).AOT_STEPS if _exists(STEPS_OF) else ()
    return [step for step in steps if only in step.name]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def _compile_case(case: AotCase, broken: list[str]) -> list[KernelReport]:
    """The reports of its kernels, one for nearly every case; what is wrong is appended to `broken`."""
    try:
        reports, _, _ = _compile(case.name, case.function, case.args)
    except Exception as error:  # whatever a compiler raises; the other cases are still of interest
        broken.append(f"{case.name}: does not compile: {type(error).__name__}: {str(error)[:300]}")
        return []
    if not reports:
        broken.append(f"{case.name}: runs no Mosaic kernel")
    for r in reports:
        broken += r.broken_budgets(needs_wgmma=case.needs_wgmma, max_spill_bytes=case.max_spill_bytes)
        print(
            f"{r.name:64} {r.registers:4} registers {r.spill_bytes:5} spilled {r.shared_bytes:7} shared "
            f"{r.wgmma:4} wgmma {r.tma:3} tma {r.seconds:6.2f} s",
            flush=True,
        )
    return reports


def _compile_step(step: AotStep, broken: list[str]) -> list[dict[str, Any]]:
    """One report or none; `kernels` counts its distinct Mosaic kernels. No collective exists on one GPU."""
    try:
        with choosing_for_hopper():
            kernels, compiled, seconds = _compile(step.name, step.function, step.args)
    except Exception as error:  # as above
        broken.append(f"{step.name}: does not compile: {type(error).__name__}: {str(error)[:300]}")
        return []
    memory = compiled.memory_analysis()
    temp_bytes = 0 if memory is None else int(memory.temp_size_in_bytes)
    broken += [sentence for kernel in kernels for sentence in kernel.broken_budgets()]
    if not kernels:
        broken.append(f"{step.name}: runs no Mosaic kernel")
    if temp_bytes > step.max_temp_bytes:
        broken.append(
            f"{step.name}: takes {temp_bytes} temporary bytes, at most {step.max_temp_bytes} are allowed"
        )
    print(f"{step.name:64} {len(kernels)} kernels {temp_bytes} temporary bytes {seconds:.1f} s", flush=True)
    report = {
        "name": step.name,
        "devices": 1,
        "temp_bytes": temp_bytes,
        "exposed_collectives": 0,
        "overlapped_collectives": 0,
        "seconds": round(seconds, 2),
        "kernels": len(kernels),
    }
    return [report]


def _compile(name: str, function, args) -> tuple[list[KernelReport], jax.stages.Compiled, float]:
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        started = time.perf_counter()
        compiled = compile_for(h200_mesh(), function, args)
        seconds = time.perf_counter() - started
        return read_reports(Path(folder), name, seconds), compiled, seconds


def _environment() -> Path | None:
    """The interpreter that `.ci/aot` made, of the oldest version of jax: that is its default."""
    return min(ROOT.glob(".cache/aot-venv-*/bin/python"), default=None, key=str)


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
