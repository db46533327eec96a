"""Compiles one case or step in this process and holds it to its budgets."""

import functools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.aot_cases import AotCase, AotStep, all_cases, all_steps
from pallas_kernels.aot_program import count_collectives, dense_arrays
from pallas_kernels.aot_report import KernelReport, read_reports
from pallas_kernels.aot_target import compile_for, h200_mesh
from pallas_kernels.backend import choosing_for_hopper


@dataclass(frozen=True)
class Task:
    """A case or step by name, so that another process can look it up."""

    kind: str  # "case" or "step"
    name: str
    module: str | None = None  # that holds it; None: the ops' and the server's own


@dataclass(frozen=True)
class StepReport:
    """A whole step. temp_bytes: beside arguments and results. kernels: distinct Mosaic kernels."""

    name: str
    devices: int
    temp_bytes: int
    exposed_collectives: int
    overlapped_collectives: int
    seconds: float
    kernels: int
    alias_bytes: int
    argument_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What came of a task. broken: a sentence for each budget that was not kept."""

    kernels: tuple[KernelReport, ...] = ()
    steps: tuple[StepReport, ...] = ()
    broken: tuple[str, ...] = ()


def compile_task(task: Task) -> Outcome:
    """Never raises: what the compiler raises becomes a broken budget, for the other tasks are still of interest."""
    try:
        if task.kind == "case":
            return _compile_case(next(case for case in _cases(task.module) if case.name == task.name))
        return _compile_step(next(step for step in _steps(task.module) if step.name == task.name))
    except Exception as error:
        return Outcome(broken=(f"{task.name}: does not compile: {type(error).__name__}: {str(error)[:300]}",))


@functools.cache
def _cases(module: str | None) -> list[AotCase]:
    return all_cases(module=module)


@functools.cache
def _steps(module: str | None) -> list[AotStep]:
    return all_steps(module=module)


def _compile_case(case: AotCase) -> Outcome:
    reports, _ = _compile(case.name, case.function, case.args)
    broken = [
        sentence
        for report in reports
        for sentence in report.broken_budgets(
            needs_wgmma=case.needs_wgmma, max_spill_bytes=case.max_spill_bytes
        )
    ]
    if not reports:
        broken.append(f"{case.name}: runs no Mosaic kernel")
    return Outcome(kernels=tuple(reports), broken=tuple(broken))


def _compile_step(step: AotStep) -> Outcome:
    mesh = h200_mesh(step.devices)
    with choosing_for_hopper():
        function, args = step.build(mesh)
        started = time.perf_counter()
        kernels, compiled = _compile(step.name, function, args, step.devices)
        seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    program = compiled.as_text() or ""
    collectives = count_collectives(program)
    report = StepReport(
        step.name,
        step.devices,
        int(memory.temp_size_in_bytes),
        collectives.exposed,
        collectives.overlapped,
        round(seconds, 2),
        len(kernels),
        int(memory.alias_size_in_bytes),
        int(memory.argument_size_in_bytes),
    )
    # Kernels without products (the router) keep the budgets of their own cases.
    broken = [s for k in kernels for s in k.broken_budgets(needs_wgmma=False, max_spill_bytes=32)]
    if not any(kernel.wgmma for kernel in kernels):
        broken.append(f"{step.name}: runs no Mosaic kernel that multiplies")
    broken += broken_step_budgets(step, report, dense_arrays(program, step.dense_elements))
    return Outcome(steps=(report,), broken=tuple(broken))


def broken_step_budgets(step: AotStep, report: StepReport, dense: list[str]) -> list[str]:
    """Sentences, empty where all is well. dense: see `dense_arrays`."""
    broken = []
    if report.temp_bytes > step.max_temp_bytes:
        broken.append(f"takes {report.temp_bytes} temporary bytes, at most {step.max_temp_bytes} are allowed")
    if dense:
        broken.append(f"has {len(dense)} arrays of {step.dense_elements} elements or more, first {dense[0]}")
    if report.alias_bytes < step.min_alias_bytes:
        broken.append(f"updates {report.alias_bytes} bytes in place, at least {step.min_alias_bytes} must be")
    allowed = step.max_exposed_collectives
    if allowed is not None and report.exposed_collectives > allowed:
        broken.append(
            f"leaves {report.exposed_collectives} collectives exposed, at most {allowed} are allowed"
        )
    return [f"{step.name}: {sentence}" for sentence in broken]


def _compile(
    name: str, function: Callable[..., object], args: tuple[Any, ...], devices: int = 1
) -> tuple[list[KernelReport], jax.stages.Compiled]:
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        started = time.perf_counter()
        compiled = compile_for(h200_mesh(devices), function, args)
        return read_reports(Path(folder), name, time.perf_counter() - started), compiled
