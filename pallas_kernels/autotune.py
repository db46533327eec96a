"""`python -m pallas_kernels.autotune OP`: sweep tiles on a GPU, check numerics, write the table that the op reads.

Only tiles whose result is right are timed; the fastest goes to `tables/<device>/<op>.json` (see tables/README.md), after each
shape, so that an interrupted run loses nothing. Exit status 2 without a GPU, 1 if a shape had no right tile.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.arguments import seconds_between
from pallas_kernels.device_time import Times, best_method, measure
from pallas_kernels.interpret import InterpretParams, interpret_params, reset_interpreter
from pallas_kernels.tunable import OPS, Tunable
from pallas_kernels.tuning import FOLDER, device_folder
from pallas_kernels.workload import Fields, Prepared, Workload, compare

ROUNDS = 5
MIN_GAIN = 0.02  # below, the suggestion stays: noise is not worth an entry
DRY_RUN_CANDIDATES = 2
COMPILE_THREADS = 8


@dataclass(frozen=True)
class Candidate:
    """A tile that was tried. why_not: empty where it is right and timed."""

    fields: Fields
    times: Times | None = None
    why_not: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, sweeps, prints, writes."""
    options = _parser().parse_args(arguments)
    if jax.default_backend() != "gpu" and not options.dry_run:
        print(
            f"tuning needs a GPU, the default device is {jax.devices()[0].platform}; --dry-run shows what it would do"
        )
        return 2
    tunable, device = OPS[options.op], jax.devices()[0].device_kind
    method = "wall" if options.dry_run else best_method()
    interpret = interpret_params() if options.dry_run else None
    shapes = tunable.tiny if options.dry_run else tunable.shapes
    folder = options.folder or (Path(options.op) if options.dry_run else FOLDER)
    path = folder / device_folder(device) / f"{options.op}.json"
    deadline_s = time.monotonic() + options.seconds
    has_failed = False
    for workload in _workloads(tunable, shapes, options):
        if time.monotonic() > deadline_s:
            print(f"{options.seconds:g} s are over; what was measured is written")
            break
        limit = DRY_RUN_CANDIDATES if options.dry_run else len(workload.candidates)
        candidates = sweep(workload, workload.candidates[:limit], method, interpret)
        best = choose(workload, candidates)
        has_failed |= best is None
        _show(workload, candidates, best)
        if best is not None and not (options.dry_run and options.folder is None):
            write_entry(path, device, workload, best)
    return 1 if has_failed else 0


def sweep(
    workload: Workload, fields: Sequence[Fields], method: str, interpret: InterpretParams | None
) -> list[Candidate]:
    """The suggested tile first, then the others; each compared before it is timed."""
    every = [workload.default, *(f for f in fields if f != workload.default)]
    expected = workload.expected()
    with ThreadPoolExecutor(1 if interpret else COMPILE_THREADS) as pool:
        checked = list(pool.map(lambda f: _prepared(workload, f, interpret, expected), every))
    right = {str(i): p for i, p in enumerate(checked) if isinstance(p, Prepared)}
    times = measure(right, method, 1 if interpret else ROUNDS) if right else {}
    return [
        Candidate(f, times.get(str(i)), "" if isinstance(p, Prepared) else p)
        for i, (f, p) in enumerate(zip(every, checked, strict=True))
    ]


def choose(workload: Workload, candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest right one; the suggestion (the first) unless something beats it clearly. None: nothing was right."""
    timed = [c for c in candidates if c.times is not None]
    if not timed:
        return None
    best = min(timed, key=_median_s)
    first = candidates[0]
    is_clear = first.times is None or _median_s(best) < (1 - MIN_GAIN) * first.times.median_s
    return best if is_clear else first


def write_entry(path: Path, device: str, workload: Workload, best: Candidate) -> None:
    """Adds or replaces one entry; the file is replaced whole."""
    table: dict[str, Any] = {"device": device, "tiles": {}}
    if path.is_file():
        table = json.loads(path.read_text(encoding="utf-8"))
    table["device"], table["jax"] = device, jax.__version__
    table["tiles"][workload.key] = dict(best.fields)
    if best.times is not None:
        table.setdefault("measured_us", {})[workload.key] = round(1e6 * best.times.median_s, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.autotune", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("op", choices=tuple(name for name, op in OPS.items() if op.has_table))
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name has this text in it")
    parser.add_argument(
        "--seconds",
        type=seconds_between(1),
        default=600.0,
        help="start no shape after so long (default: 600)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the tables (default: the package's own)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny shapes in the interpreter; writes only where --folder says",
    )
    return parser


def _workloads(tunable: Tunable, shapes: Sequence[Any], options: argparse.Namespace) -> Iterator[Workload]:
    """One at a time: each may take most of the device's memory."""
    wanted = [shape for shape in shapes if options.only in shape.name]
    if not wanted:
        print(f"nothing has {options.only!r} in its name; there are {', '.join(s.name for s in shapes)}")
    for shape in wanted:
        yield tunable.make(shape, options.seed)


def _prepared(
    workload: Workload, fields: Fields, interpret: InterpretParams | None, expected: np.ndarray
) -> Prepared | str:
    """The call, or why this tile is out: it does not fit, does not compile, or is wrong."""
    try:
        prepared = workload.prepare(fields, interpret)
        out = prepared.function(prepared.links[0], *prepared.args)
        errors = compare(out[prepared.sampled], expected)
    except Exception as error:  # whatever a compiler raises: the other tiles are still of interest
        if interpret is not None:
            reset_interpreter()
        return f"{type(error).__name__}: {str(error)[:120]}"
    if errors.is_right:
        return prepared
    return f"{errors.num_wrong} of {errors.num_values} values are wrong, by up to {errors.max_error:.3g}"


def _median_s(candidate: Candidate) -> float:
    assert candidate.times is not None
    return candidate.times.median_s


def _show(workload: Workload, candidates: Sequence[Candidate], best: Candidate | None) -> None:
    print(f"{workload.name} ({workload.key})")
    for c in sorted(candidates, key=lambda c: c.times.median_s if c.times else float("inf")):
        tile = " ".join(f"{name}={value}" for name, value in c.fields.items())
        marks = ("*" if c is best else " ") + ("suggested" if c is candidates[0] else "")
        what = c.why_not or (
            f"{1e6 * _median_s(c):9.2f} us, spread {100 * c.times.spread:.0f} % ({c.times.method})"
            if c.times
            else ""
        )
        print(f"  {marks:11}{tile:52} {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
