"""The ahead-of-time tool: its list of cases, its answer without a compiler, and every budget where there is one."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import aot
from pallas_kernels.aot_cases import AotStep, all_cases, all_steps
from pallas_kernels.aot_compile import StepReport, broken_step_budgets
from pallas_kernels.aot_target import missing_wheels

# planted_aot.py: name to what the report must say of it
PLANTED = {
    "planted/spill": r"spills \d+ bytes",
    "planted/no wgmma": "has no wgmma instruction",
    "planted/dies": "the compiler ended its process",
    "planted/hangs": "not compiled after 30 s",
    "planted/raises": "ValueError: on purpose",
    "planted/dense": r"arrays of \d+ elements or more",
    "planted/exposed": "leaves 2 collectives exposed, at most 0",
}
STEP = AotStep("s", lambda mesh: (lambda: 0, ()), max_temp_bytes=10, dense_elements=100, min_alias_bytes=5)
REPORT = StepReport(
    "s", devices=1, temp_bytes=10, exposed_collectives=3, overlapped_collectives=2, seconds=1.0, kernels=2,
    alias_bytes=5, argument_bytes=9,
)  # fmt: skip


def test_names_are_unique_and_say_their_op() -> None:
    names = [case.name for case in all_cases()]
    folders = {path.parent.name for path in Path(aot.__file__).parent.glob("*/cases.py")}
    assert len(names) == len(set(names)) > 10
    assert {name.split("/")[0] for name in names} <= folders
    assert {case.name for case in all_cases("mixtral")} < set(names)


def test_steps_of_both_models_and_phases_are_found() -> None:
    quick = [step.name for step in all_steps(only_quick=True)]
    assert {name.split("[")[0] for name in quick} == {"qwen3-30b-a3b", "deepseek-v3-moe-gqa"}
    assert sum("/decode-" in name for name in quick) == sum("/prefill-" in name for name in quick) == 2
    assert {step.name for step in all_steps()} > set(quick)


def test_without_the_wheels_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "missing_wheels", lambda: "no compiler")
    monkeypatch.setattr(aot, "_environment", lambda: None)
    assert aot.main(["--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "skipped": "no compiler",
        "kernels": [],
        "steps": [],
    }
    assert "skipped: no compiler" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--jobs", "0"], ["--jobs", "65"], ["--jobs", "x"], ["--timeout", "nan"]]
)
def test_numbers_are_bounded(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        aot.main(arguments)
    assert repr(arguments[1]) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "dense", "sentence"),
    [
        ({"temp_bytes": 11}, [], "takes 11 temporary bytes"),
        ({}, ["d = bf16[10,10] dot"], "first d = bf16"),
        ({"alias_bytes": 4}, [], "updates 4 bytes in place"),
        ({"exposed_collectives": 4}, [], "leaves 4 collectives exposed"),
    ],
)
def test_each_budget_of_a_step_breaks_alone(change: dict, dense: Sequence[str], sentence: str) -> None:
    step = replace(STEP, max_exposed_collectives=3)
    assert broken_step_budgets(step, REPORT, []) == []
    (broken,) = broken_step_budgets(step, replace(REPORT, **change), list(dense))
    assert sentence in broken


def compile_with(arguments: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and report, made where the compiler is."""
    if missing_wheels() is not None and aot._environment() is None:
        why = "no CUDA compiler here; `.ci/aot --setup-only` gets one"
        if os.environ.get("AOT_REQUIRED"):
            pytest.fail(why)
        pytest.skip(why)
    path = folder / "report.json"
    status = aot.main([*arguments, "--json", str(path)])
    return status, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1500)  # a busy machine
def test_every_kernel_and_step_keeps_its_budgets(tmp_path: Path) -> None:
    """All of it: about a minute on two idle cores."""
    status, report = compile_with(["--quick", "--jobs", "2"], tmp_path)
    assert report["broken"] == []
    assert status == 0
    kernels, steps = report["kernels"], report["steps"]
    assert {k["name"].split("[")[0] for k in kernels} == {case.name for case in all_cases()}
    without_products = {case.name for case in all_cases() if not case.needs_wgmma}
    assert all(k["wgmma"] > 0 for k in kernels if k["name"] not in without_products)
    spills = {case.name: case.max_spill_bytes for case in all_cases()}
    assert all(k["spill_bytes"] <= spills[k["name"].split("[")[0]] for k in kernels)
    assert all(0 < k["shared_bytes"] <= 227 * 1024 and k["registers"] <= 255 for k in kernels)
    assert [s["name"] for s in steps] == [step.name for step in all_steps(only_quick=True)]
    assert all(s["kernels"] >= 2 and s["exposed_collectives"] == 0 and s["devices"] == 1 for s in steps)
    fields = {"name", "registers", "spill_bytes", "shared_bytes", "wgmma", "tma", "seconds"}
    assert all(fields <= set(k) for k in kernels)


@pytest.mark.slow
def test_planted_faults_break_their_budgets(tmp_path: Path) -> None:
    status, report = compile_with(
        ["--cases", "tests.pallas_kernels.planted_aot", "--jobs", "2", "--timeout", "30"], tmp_path
    )
    assert status == 1
    missed = [
        name
        for name, what in PLANTED.items()
        if not any(re.match(f"{name}.*{what}", s) for s in report["broken"])
    ]
    assert missed == []
    assert {s.partition(":")[0] for s in report["broken"]} == set(PLANTED)
