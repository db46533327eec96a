"""`python -m runtime.bench COMMAND ...`: measurements. Every command prints a table and takes `--json FILE`."""

import argparse
import sys
from pathlib import Path

from runtime.bench import (
    adaptive,
    dispatch_quality,
    experts,
    lean_quality,
    limits,
    move_cost,
    offline,
    residency,
    sweep,
    trace,
)
from runtime.bench.report import console, machine_stamp, print_table, write_json
from runtime.errors import RuntimeFault

COMMANDS = {
    "offline": (offline, "decode and prefill tokens/s beside this machine's bound"),
    "trace": (trace, "replay a recorded workload: TTFT, ITL, TPOT, goodput, padding, rungs"),
    "sweep": (
        sweep,
        "batch sizes: latency, tokens/s, utilisation, zones; plots and a recommended configuration",
    ),
    "adaptive": (adaptive, "static batches, fixed rungs and the controller under a load that swings"),
    "experts": (experts, "expert placement: imbalance by policy, after a shift, moves, plan time"),
    "dispatch": (dispatch_quality, "what fp8 or bf16 tokens on their way to experts cost in text quality"),
    "moves": (
        move_cost,
        "p99 of decode steps with and without moves of experts, beside the time of the copies",
    ),
    "lean": (lean_quality, "what leaning between experts costs in text quality and gains in balance"),
    "residency": (residency, "experts that sleep: hit rates by policy, and the engine with part resident"),
    "limits": (limits, "rates of memory reads and of matrix products here and now"),
}


def main(argv: list[str] | None = None) -> int:
    """Status 0; 1 if something was compiled late; 2 with one line on wrong input."""
    parser = argparse.ArgumentParser(prog="python -m runtime.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args(argv)
    try:
        result = COMMANDS[args.command][0].run(args)
    except (ValueError, OSError, RuntimeFault, RuntimeError, TimeoutError) as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 2
    if args.command == "limits" and not args.raw:
        print_table(machine_stamp()["cpu"], ("limit", "best"), result.items())
    if args.json:
        write_json(args.json, result)
        console.print(f"written to {args.json}", highlight=False)
    return 1 if result.get("late_compiles") else 0


if __name__ == "__main__":
    sys.exit(main())
