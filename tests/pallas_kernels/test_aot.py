"""The ahead-of-time tool: its list of cases, its answer without a compiler, and every budget where there is one."""

import json
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import aot
from pallas_kernels.aot_target import missing_wheels

OPS = ("grouped_matmul", "paged_attention", "prefill_attention", "router")


def test_names_are_unique_and_say_their_op() -> None:
    names = [case.name for case in aot.all_cases()]
    assert len(names) == len(set(names)) > 10
    assert all(name.split("/")[0] in OPS for name in names)
    assert {case.name for case in aot.all_cases("mixtral")} < set(names)


def test_steps_of_a_model_are_found() -> None:
    assert {step.name.split("/")[1] for step in aot.all_steps()} == {"decode", "prefill"}


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


def compile_only(text: str, folder: Path) -> dict[str, Any]:
    """The report of the cases and steps with this text, made in a process of its own where the compiler is."""
    if missing_wheels() is not None and aot._environment() is None:
        pytest.skip("no CUDA compiler here; `.ci/aot --setup-only` gets one")
    path = folder / "report.json"
    aot.main(["--only", text, "--json", str(path)])
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_kernel_keeps_its_budgets(op: str, tmp_path: Path) -> None:
    report = compile_only(f"{op}/", tmp_path)
    assert report["broken"] == []
    kernels = report["kernels"]
    assert len(kernels) >= len(aot.all_cases(f"{op}/")) > 0
    assert all(k["spill_bytes"] == 0 and k["wgmma"] > 0 and k["tma"] > 0 for k in kernels)
    assert all(0 < k["shared_bytes"] <= 227 * 1024 and k["registers"] <= 255 for k in kernels)


@pytest.mark.slow
def test_whole_steps_run_the_kernels_and_multiply_nothing_densely(tmp_path: Path) -> None:
    report = compile_only(" layers]/", tmp_path)
    assert report["broken"] == []
    assert {step["name"] for step in report["steps"]} == {step.name for step in aot.all_steps()}
    assert all(step["kernels"] >= 2 for step in report["steps"])
