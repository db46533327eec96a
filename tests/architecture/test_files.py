"""Files stay small, are named in the README, and hold nothing of the machine they were written on."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import config_docs, readme_tree

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
FOLDERS = ("runtime", "pallas_kernels", "control_plane", "ui", "benchmarks")
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jinja", ""}
_PERSONAL_FOLDER = re.compile(r"""(?<![\w.:/$}])/(?:root|home|work|opt|Users)/""")
_KEY = re.compile(r"\b(?:sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})\b")


def committed_texts() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        return SOURCES  # an unpacked archive: the sources are what there is
    paths = [ROOT / name for name in names if name]
    return [p for p in paths if p.suffix in TEXT_SUFFIXES and p.is_file() and p.stat().st_size < 1 << 20]


def names(tree: str) -> list[str]:
    return [line.split()[0] for line in tree.splitlines() if line.strip() and not line.startswith("`")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_concept_with_a_first_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    assert not text.strip() or readme_tree.phrase(text), "the first line says what the file is for"


def test_the_readme_names_every_source_file() -> None:
    """Names and their order only: a phrase may lag behind its file's first line until the next `make docs`."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition(readme_tree.BEGIN)[2]
    assert names(tree.partition(readme_tree.END)[0]) == names(readme_tree.render()), "run make docs"


def test_the_page_of_the_configuration_is_current() -> None:
    assert config_docs.PAGE.read_text(encoding="utf-8") == config_docs.render(), "run make docs"


def test_constraints_pin_everything_by_version_alone() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()
    assert len(lines) > 50
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][A-Za-z0-9.+]*", line) for line in lines)


def test_nothing_committed_names_a_personal_folder_or_holds_a_key() -> None:
    this_file = Path(__file__).resolve()
    found = []
    for path in committed_texts():
        if path.resolve() == this_file:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [
            f"{path.relative_to(ROOT)}: {m[0]}"
            for m in (*_PERSONAL_FOLDER.finditer(text), *_KEY.finditer(text))
        ]
    assert not found


def test_results_say_what_they_were_taken_with() -> None:
    """At the top, or in the stamp of `runtime.bench.report`."""
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        machine = result.get("machine")
        stamp = set(result) | (set(machine) if isinstance(machine, dict) else set())
        assert {"machine", "commit", "jax"} <= stamp, path.name
