"""`python -m benchmarks.gpu.part NAME OUT ...`: one part of the check, a line of JSON for each finished item."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu.options import Options, write_line

# name: (module, function); imported here only, so that one part's packages are not another's need
PARTS = {
    "limits": ("benchmarks.gpu.limits", "run"),
    "numerics": ("benchmarks.gpu.numerics", "run"),
    "kernels": ("benchmarks.gpu.kernel_times", "run"),
    "engine": ("benchmarks.gpu.engine", "run"),
    "warm_start": ("benchmarks.gpu.engine", "run_warm_start"),
    "peers": ("benchmarks.gpu.peers", "run"),
    "torch": ("benchmarks.gpu.peers", "run_torch"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part")
    parser.add_argument("name", choices=tuple(PARTS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--limits", type=json.loads, default={})
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.seconds
    if args.dry_run:
        import jax  # noqa: PLC0415 - torch's part needs no JAX

        jax.config.update("jax_platforms", "cpu")
    options = Options(args.dry_run, args.seed, deadline_s, args.folder, args.layers, args.limits)
    module, function = PARTS[args.name]
    for line in getattr(importlib.import_module(module), function)(options):
        write_line(args.out, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
