"""`python -m pallas_kernels`: each op, the backend that it would run here, and why not another."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

from pallas_kernels.backend import choosing_for_hopper
from pallas_kernels.choices import list_choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels", description=(__doc__ or "").split(": ")[1]
    )
    parser.add_argument("--hopper", action="store_true", help="what a Hopper GPU would run")
    parser.add_argument("--json", action="store_true", help="JSON and no table")
    options = parser.parse_args(arguments)
    with choosing_for_hopper() if options.hopper else nullcontext():
        choices = list_choices()
    if options.json:
        print(json.dumps([asdict(choice) for choice in choices], indent=1))
        return 0
    for found in choices:
        print(f"{found.op:18} {found.choice.name:10} {found.operands}\n{'':29} {found.choice.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
