"""What every measurement prints and stores: percentiles, the machine's stamp, one table, one JSON file. Imports no JAX.

A stamp says on what and with what a number was taken; it names no folder and no user, so results may be published.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PERCENTILES = (50, 90, 99)
_REPOSITORY = Path(__file__).parents[2]

console = Console(stderr=True)  # progress and remarks; tables go to standard output


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` % lie, linear between neighbours; None of an empty sequence."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float], digits: int = 4) -> dict[str, float | int | None]:
    """Mean and p50, p90, p99 with the number of values they rest on."""
    mean = round(statistics.fmean(values), digits) if values else None
    found = {p: percentile(values, p) for p in PERCENTILES}
    return {"n": len(values), "mean": mean} | {
        f"p{p}": None if v is None else round(v, digits) for p, v in found.items()
    }


def spread_percent(values: Sequence[float]) -> float:
    """Largest minus smallest over the median, in percent."""
    return round(100 * (max(values) - min(values)) / statistics.median(values), 1)


def machine_stamp() -> dict[str, Any]:
    """Machine, versions and commit that a number belongs to."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "commit": _commit(),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Whole file or none: written beside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; None shows as a dash, the first column is text and the rest are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*("-" if cell is None else _cell(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def progress_bar() -> Progress:
    """A bar on standard error; a plain log instead of a terminal shows nothing until the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short commit of the source tree, `+` when files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603

    try:
        is_dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if is_dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None
