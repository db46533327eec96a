"""The check on a chip, on a CPU: every part runs on tiny shapes, and one that hangs, dies or errs is reported as such."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.options import read_lines, write_line
from benchmarks.gpu.report import table


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine: half a minute on two idle cores
def test_a_dry_run_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "check.json"
    status = gpu_check.main(["--dry-run", "--json", str(path), "--seconds", "2000"])
    result = json.loads(path.read_text())
    assert status == 0, capsys.readouterr().out
    assert list(result["parts"]) == list(gpu_check.SHARES)
    assert set(result["ends"].values()) == {"done"}
    numerics = result["parts"]["numerics"]
    assert {line["item"].split("/")[0] for line in numerics} >= {
        "grouped_matmul", "expert_mlp", "paged_attention", "prefill_attention",
    }  # fmt: skip
    assert all(line["is_right"] and not line["has_races"] for line in numerics)
    lines = [line for name, part in result["parts"].items() if name != "torch" for line in part]
    assert [line for line in lines if "skipped" in line] == []
    items = {line["item"]: line for part in result["parts"].values() for line in part}
    assert items["warm start"]["rungs_from_cache"] == items["warm start"]["rungs"] == 3
    assert items["cold start"]["rungs_from_cache"] == 0
    assert items["decode 2 x 16"]["tokens_s"] > 0
    assert all(line["us"] > 0 and line["bound_us"] > 0 for line in result["parts"]["kernels"])
    assert "all good" in capsys.readouterr().out


def run_with(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str = "300"
) -> tuple[int, dict[str, Any]]:
    """One part, with a script in place of Python: $4 is where its lines go. seconds: a tenth of it is the part's."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(gpu_check.sys, "executable", str(program))
    monkeypatch.setattr(gpu_check, "SHARES", {"limits": 0.1})
    path = tmp_path / "check.json"
    status = gpu_check.main(["--parts", "limits", "--json", str(path), "--seconds", seconds])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("""echo '{"item": "first"}' >>"$4"; sleep 300""", "ended by force after 3 s"),
        ("""echo '{"item": "first"}' >>"$4"; echo out of luck >&2; exit 3""", "exit status 3: out of luck\n"),
        ("""printf '{"item": "first"}\n{"item": "sec' >>"$4"; exit 3""", "exit status 3: "),
    ],
)
def test_what_a_lost_part_had_finished_is_kept(
    script: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = "30" if "force" in end else "300"
    status, result = run_with(script, tmp_path, monkeypatch, seconds)
    assert status == 1
    assert result["parts"]["limits"] == [{"item": "first"}]
    assert result["ends"]["limits"] == end


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('{"item": "a", "is_right": true}', 0),
        ('{"item": "a", "is_right": false}', 1),
        ('{"item": "a", "failed": "x"}', 1),
        ('{"item": "a", "skipped": "torch is not installed"}', 0),
    ],
)
def test_the_status_tells_wrong_results(
    line: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(f"""echo '{line}' >>"$4" """, tmp_path, monkeypatch)[0] == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "1"],
        ["--seconds", "nan"],
        ["--layers", "0"],
        ["--layers", "95"],
        ["--parts", "limits,x"],
    ],
)
def test_bad_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_lines_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read_lines(path) == []
    write_line(path, {"item": "a"})
    with path.open("a") as file:
        file.write('{"item": "half')
    assert read_lines(path) == [{"item": "a"}]


def test_a_table_says_what_was_not_measured() -> None:
    text = table("kernels", [{"item": "a", "us": 12.345}, {"item": "b", "skipped": "no GPU"}])
    assert "12.3" in text
    assert "skipped: no GPU" in text
    assert all(table(part, []) for part in gpu_check.SHARES)
