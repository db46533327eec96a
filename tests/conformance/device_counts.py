"""The text of one device from every number of devices: all counts, both exchanges, with and without copies, two tensor sizes.

    python tests/conformance/device_counts.py                    the whole cross product, about seven minutes
    python tests/conformance/device_counts.py --only 3x1 --only 4x2

Greedy float32 text of 24 requests on eight virtual devices, in one process: first with the placement of the start, then
while random placements follow each other. Rows, rungs, pages and experts are numbers that most counts do not divide;
all_to_all has so little room that rounds overflow, and pages are so few that small engines preempt. Ends with 1 when a
text differs, no round overflowed, no expert moved, or an engine makes no progress for two minutes.
"""

import argparse
import faulthandler
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
MAX_DEVICES = 8
STUCK_AFTER_S = 120

EXPERTS, TOP_K = 8, 2  # of the model that EngineDriver makes
REDUNDANT = 3
CAPACITY_FACTOR = 0.1


@dataclass(frozen=True)
class Case:
    """One engine."""

    shards: int
    tensor: int
    exchange: str = "gather"
    redundant: int = 0

    @property
    def name(self) -> str:
        return f"{self.shards}x{self.tensor}"


def all_cases() -> list[Case]:
    """Every count of shards with tensor size 1, and 2 where the devices are enough."""
    cases = [Case(1, 2)]
    for tensor in (1, 2):
        for shards in range(2, MAX_DEVICES // tensor + 1):
            for exchange in ("gather", "all_to_all"):
                cases += [Case(shards, tensor, exchange, redundant) for redundant in (0, REDUNDANT)]
    return cases


def make_requests(tag: str) -> list[Any]:
    import numpy as np

    from tests.engine_driver import request

    rng = np.random.default_rng(7)
    lengths = rng.integers(3, 80, 24).tolist()
    lengths[5] = lengths[16] = 190  # more than a step takes
    prompts = [rng.integers(0, 128, length).tolist() for length in lengths]
    return [request(f"{tag}-{i}", p, max_tokens=1 + 13 * i % 61) for i, p in enumerate(prompts)]


def start(case: Case) -> Any:
    from tests.engine_driver import EngineDriver

    parallel: dict[str, Any] = {
        "expert_parallel_size": case.shards,
        "tensor_parallel_size": case.tensor,
        "redundant_experts": case.redundant,
        "capacity_factor": CAPACITY_FACTOR,
    }
    if case.shards > 1:
        parallel["exchange"] = case.exchange
    return EngineDriver(
        parallel=parallel,
        ladder={"decode_rows": [10], "prefill_tokens": [300], "max_decode_steps": 3},
        kv_cache={"kv_cache_size": "72KiB"},
        batch_processing={"max_batch_size": 10, "base_batch_size": 10},
    )


def num_overflows(driver: Any, case: Case) -> int:
    """Launches in which some device got more rows than one round of all_to_all brings: further rounds ran."""
    from runtime.experts.exchange_spec import choose_capacity
    from runtime.schedule.plan import Phase

    slots, found = -(-(EXPERTS + case.redundant) // case.shards), 0
    for step, collected in driver.steps:
        if step.bucket.phase is Phase.PREFILL:
            tokens = step.bucket.tokens // case.shards
            room = choose_capacity(tokens, TOP_K, case.shards, slots, CAPACITY_FACTOR)
            found += bool((collected.device_rows > case.shards * room).any())
    return found


def check(case: Case, expected: list[list[int]]) -> dict[str, Any]:
    """Figures of one engine; `problems` names what is not as it must be."""
    from tests.sharded_driver import run_through_moves

    start_s = time.monotonic()
    driver = start(case)
    try:
        same = driver.run(make_requests("still")) == expected
        overflows = num_overflows(driver, case) if case.exchange == "all_to_all" else None
        same_moving, moves = None, 0
        if driver.mover is not None:
            driver.scheduler.clear_prefix_cache()
            text, _ = run_through_moves(driver, make_requests("moving"), num_orders=10)
            same_moving, moves = text == expected, driver.mover.num_applied
    finally:
        driver.close()
    problems = [] if same else ["other text"]
    problems += ["other text while experts move"] if same_moving is False else []
    problems += ["no overflow"] if overflows == 0 else []
    problems += ["no moves"] if case.shards > 1 and moves == 0 else []
    return {
        "devices": case.name,
        "exchange": case.exchange if case.shards > 1 else "none",
        "redundant_experts": case.redundant,
        "steps_that_overflowed": overflows,
        "preemptions": driver.scheduler.num_preemptions,
        "moves": moves,
        "seconds": round(time.monotonic() - start_s, 1),
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="SHARDSxTENSOR", help="these counts; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    cases = all_cases()
    if unknown := set(args.only or ()) - {case.name for case in cases}:
        parser.error(f"--only {sorted(unknown)}: allowed are {sorted({case.name for case in cases})}")
    from runtime.xla_flags import use_virtual_devices

    os.environ["JAX_PLATFORMS"] = "cpu"
    use_virtual_devices(MAX_DEVICES)

    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    driver = start(Case(1, 1))
    expected = driver.run(make_requests("one"))
    driver.close()
    results = []
    for case in cases:
        if args.only and case.name not in args.only:
            continue
        faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
        results.append(found := check(case, expected))
        print("BAD" if found["problems"] else "ok ", *(f"{k} {v}" for k, v in found.items()), flush=True)
    faulthandler.cancel_dump_traceback_later()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    num_bad = sum(bool(r["problems"]) for r in results)
    print(f"{len(results)} engines, {num_bad} with problems")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
