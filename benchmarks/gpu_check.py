"""`python -m benchmarks.gpu_check --json FILE`: every kernel and the engine on one Hopper GPU, in less than eight minutes.

Parts run one after another, the most important first, each in a process of its own with a share of the time: one that
hangs or dies costs its own rest. The JSON file is rewritten after every finished item. What is missing (torch, cuDNN,
packages of the server) is reported, and no failure. Exit status 1 if a result was wrong or a part failed.

`--dry-run`: the same code on tiny shapes on a CPU, kernels in the interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.options import Line, read_lines
from benchmarks.gpu.report import table
from pallas_kernels.arguments import seconds_between, whole_number_to

ROOT = Path(__file__).parents[1]
# In order of importance, with the largest share of the whole time that each may take.
SHARES = {
    "limits": 0.12,
    "numerics": 0.30,
    "kernels": 0.25,
    "engine": 0.35,
    "warm_start": 0.20,
    "peers": 0.15,
    "torch": 0.10,
}
RESERVE_S = 5.0  # between the moment that a part begins nothing new and its end by force
DRY_RUN_LAYERS = 2
MAX_LAYERS = 94


@dataclass
class Result:
    """What the JSON file holds."""

    path: Path | None
    head: dict[str, Any]
    parts: dict[str, list[Line]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        if self.path is None:
            return
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(
            json.dumps(self.head | {"parts": self.parts, "ends": self.ends}, indent=1) + "\n",
            encoding="utf-8",
        )
        beside.replace(self.path)

    @property
    def limits(self) -> dict[str, float]:
        """Measured rates, once they are there."""
        for line in self.parts.get("limits", []):
            if line["item"] == "limits":
                return {name: line[name] for name in ("bytes_per_s", "flops_per_s")}
        return {}

    @property
    def is_good(self) -> bool:
        lines = [line for part in self.parts.values() for line in part]
        is_right = all(line.get("is_right", True) and "failed" not in line for line in lines)
        return is_right and all(end == "done" for end in self.ends.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, prints their tables."""
    options = _parser().parse_args(arguments)
    head = {
        "command": "python -m benchmarks.gpu_check",
        "dry_run": options.dry_run,
        "seed": options.seed,
        "layers": DRY_RUN_LAYERS if options.dry_run else options.layers,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    result = Result(options.json, head)
    end_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for part in options.parts or SHARES:
            left_s = end_s - time.monotonic()
            if left_s < 2 * RESERVE_S:
                result.ends[part] = "no time left"
            else:
                run_part(part, min(left_s, SHARES[part] * options.seconds), result, options, Path(folder))
            result.write()
            print(table(part, result.parts.get(part, [])), flush=True)
            print(f"   {result.ends[part]}\n", flush=True)
    print(
        f"{'all good' if result.is_good else 'NOT GOOD'}, {options.seconds - (end_s - time.monotonic()):.0f} s"
    )
    return 0 if result.is_good else 1


def run_part(part: str, seconds: float, result: Result, options: argparse.Namespace, folder: Path) -> None:
    """Starts the part, follows its lines, ends it when its time is over."""
    out, log = folder / f"{part}.jsonl", folder / f"{part}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.part", part, str(out)]
    command += ["--seconds", str(seconds - RESERVE_S), "--seed", str(options.seed), "--folder", str(folder)]
    command += ["--layers", str(result.head["layers"]), "--limits", json.dumps(result.limits)]
    command += ["--dry-run"] if options.dry_run else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if options.dry_run:
        environment |= {"JAX_PLATFORMS": "cpu"}
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() - started_s < seconds:
                time.sleep(0.2)
                lines = read_lines(out)
                if len(lines) != len(result.parts.get(part, [])):
                    result.parts[part] = lines
                    result.ends[part] = "running"
                    result.write()
        finally:
            is_late = process.poll() is None
            process.kill()
            process.wait()
    result.parts[part] = read_lines(out)
    if is_late:
        result.ends[part] = f"ended by force after {seconds:.0f} s"
    elif process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-600:]
        result.ends[part] = f"exit status {process.returncode}: {tail}"
    else:
        result.ends[part] = "done"
        result.head.setdefault("seconds", {})[part] = round(time.monotonic() - started_s, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="rewritten after every finished item")
    parser.add_argument(
        "--seconds", type=seconds_between(30), default=450.0, help="for all parts together (default: 450)"
    )
    parser.add_argument(
        "--parts", type=_parts, default=(), metavar="A,B", help=f"only these, of {', '.join(SHARES)}"
    )
    parser.add_argument(
        "--layers",
        type=whole_number_to(MAX_LAYERS),
        default=8,
        help="of the engine's model; Qwen3-30B-A3B has 48 (default: 8)",
    )
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(3)), help="of all inputs (default: a new one)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU, kernels in the interpreter"
    )
    return parser


def _parts(text: str) -> tuple[str, ...]:
    wanted = tuple(filter(None, text.split(",")))
    unknown = [part for part in wanted if part not in SHARES]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"{text[:50]!r}: names of {', '.join(SHARES)}, separated by commas")
    return tuple(part for part in SHARES if part in wanted)


if __name__ == "__main__":
    sys.exit(main())
