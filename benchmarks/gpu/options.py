"""What a part of the check is told, and the lines it answers with."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Line = dict[str, Any]  # one finished item; "item" names it
type Lines = Iterator[Line]


@dataclass(frozen=True)
class Options:
    """deadline_s: of time.monotonic(), after which no item is begun. folder: for models and caches, kept between parts.
    limits: measured rates of the device, empty where that part has not run.
    """

    is_dry_run: bool
    seed: int
    deadline_s: float
    folder: Path
    num_layers: int
    limits: Mapping[str, float]

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline_s

    @property
    def bytes_per_s(self) -> float:
        """Measured, else what an H200 can copy."""
        return self.limits.get("bytes_per_s", 4.3e12)

    @property
    def flops_per_s(self) -> float:
        """Measured in bfloat16, else what an H200 does on random data."""
        return self.limits.get("flops_per_s", 7.9e14)


def skipped(item: str, why: str) -> Line:
    return {"item": item, "skipped": why}


def failed(item: str, error: Exception) -> Line:
    return {"item": item, "failed": f"{type(error).__name__}: {str(error)[:300]}"}


def write_line(path: Path, line: Line) -> None:
    """Appended at once: what is in the file is not lost when the process is."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Whole lines only: the last may still be written."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
