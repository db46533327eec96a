"""Live changes on the real server under streaming load by two operators at once, and kill -9 in the middle of PATCHes.

    python tests/conformance/live_changes.py                      200 changes, then ten kills
    python tests/conformance/live_changes.py --changes 50 --kills 0

Ends with 1 when a request failed, an update was lost, a greedy answer changed, the audit's chain breaks, a rollback is
slow or does not restore, something was compiled late, memory grows, or a kill left a store that is not whole.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance.kill_during_patch import kill_during_patch
from tests.conformance.operated_server import operated_server
from tests.conformance.random_changes import CONFIG, ROW_SLOTS, Accepted, Operator, history, lost_updates
from tests.conformance.streaming_load import StreamingLoad

MAX_ROLLBACK_S = 1.0
MAX_GROWTH = 0.15  # of the resident memory, in the second half of the changes
SETTLE_TIMEOUT_S = 300


@dataclass
class Report:
    """Lines of the table; those with a problem decide the exit code."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, value: object, is_ok: bool = True) -> None:
        self.lines.append(("ok" if is_ok else "BAD", name, str(value)))
        print(f"  {self.lines[-1][0]:4}{name:44}{value}", flush=True)

    @property
    def is_bad(self) -> bool:
        return any(verdict == "BAD" for verdict, _, _ in self.lines)


async def change_under_load(base_url: str, num_changes: int, num_streams: int, seed: int) -> Report:
    """base_url: with /v1. The server's first revision must be the current one."""
    report = Report()
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), timeout=60) as client:
        await settled(client)
        first = (await client.get(CONFIG)).json()
        rungs = await ladder(client)
        load = StreamingLoad(base_url, "live", num_streams, seed)
        await load.start()
        accepted, start_s = [], time.monotonic()
        await asyncio.sleep(5)  # buffers take their size
        memory = []
        for half in range(2):
            made, statuses = await two_operators(client, num_changes // 2, 10 * seed + half)
            accepted += made
            memory.append(await metric(client, "process_resident_memory_bytes"))
        seconds = time.monotonic() - start_s
        report.add("changes asked for, revisions made", f"{num_changes}, {len(accepted)} in {seconds:.1f} s")
        report.add("answers to PATCH, second half", dict(statuses), statuses[412] > 0)
        now = (await client.get(CONFIG)).json()
        problems = lost_updates(accepted, await history(client), first["stored"], now["stored"])
        report.add("lost updates", problems[:3] or "none", not problems)
        await roll_back(report, client, first, rungs)
        await load.stop()
        check_requests(report, load)
        await check_server(report, client, memory)
    return report


async def two_operators(
    client: httpx.AsyncClient, num_changes: int, seed: int
) -> tuple[list[Accepted], dict[int, int]]:
    operators = [Operator(f"{seed}-{name}", client, 2 * seed + i) for i, name in enumerate("ab")]
    await asyncio.gather(*(operator.run(num_changes // 2) for operator in operators))
    return [c for o in operators for c in o.accepted], operators[0].statuses + operators[1].statuses


async def roll_back(
    report: Report, client: httpx.AsyncClient, first: dict[str, Any], rungs: list[str]
) -> None:
    """One live field back in a moment; then revision 1, whose rungs may have to be compiled again."""
    await settled(client)
    tag = (await client.get(CONFIG)).headers["etag"]
    patch = {"slo": {"itl": "77ms"}}
    made = await client.patch(CONFIG, json={"patch": patch}, headers={"If-Match": tag})
    before = int(tag.strip('"'))
    live_s, back = await timed_rollback(client, before, made.headers["etag"])
    report.add("rollback of a live field", f"{live_s:.3f} s", back == 200 and live_s < MAX_ROLLBACK_S)
    tag = (await client.get(CONFIG)).headers["etag"]
    seconds, status = await timed_rollback(client, first["revision"], tag)
    report.add(f"rollback to revision {first['revision']}", f"{status} after {seconds:.3f} s", status == 200
               and seconds < MAX_ROLLBACK_S)  # fmt: skip
    compiling_s = await settled(client)
    now = (await client.get(CONFIG)).json()
    is_same = now["effective"] == first["effective"] and now["stored"] == first["stored"]
    report.add("the configuration of revision 1 is back", is_same, is_same)
    back_rungs = await ladder(client)
    report.add("its ladder serves again", f"after {compiling_s:.1f} s", back_rungs == rungs)


async def timed_rollback(client: httpx.AsyncClient, revision: int, tag: str) -> tuple[float, int]:
    start = time.monotonic()
    answer = await client.post(f"{CONFIG}/rollback", json={"revision": revision}, headers={"If-Match": tag})
    return time.monotonic() - start, answer.status_code


def check_requests(report: Report, load: StreamingLoad) -> None:
    report.add("requests", f"{load.num_requests} {dict(load.ends)}", load.ends["cancelled"] > 0)
    report.add("failed requests", load.failures[:3] or "none", not load.failures)
    others = [text for text in load.greedy_texts if text != load.expected]
    total = load.greedy_texts.total()
    report.add("greedy answers unlike the first", others[:1] or f"none of {total}", not others and total > 0)


async def check_server(report: Report, client: httpx.AsyncClient, memory: list[float]) -> None:
    check = (await client.get("/admin/v1/audit/verify")).json()
    report.add("audit chain", f"{check['first']} to {check['last']} {check['problem']}", check["is_ok"])
    late = await metric(client, "moe_late_compiles_total")
    report.add("late compiles", late, late == 0)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        left = await metric(client, name)
        report.add(name.removeprefix("vllm:"), left, left == 0)
    half, end = memory
    text = f"{half / 2**20:.0f} MiB at half, {end / 2**20:.0f} at the end"
    report.add("resident memory", text, end < (1 + MAX_GROWTH) * half)


async def settled(client: httpx.AsyncClient) -> float:
    """Seconds until nothing compiles and no revision waits."""
    start = time.monotonic()
    while time.monotonic() < start + SETTLE_TIMEOUT_S:
        body = (await client.get("/admin/v1/ladder")).json()
        status = (await client.get(CONFIG)).json()["status"]
        is_quiet = all(rung["state"] == "ready" for rung in body["rungs"])
        if is_quiet and body["change"]["state"] != "compiling" and status != "compiling":
            return time.monotonic() - start
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the ladder does not settle: {body['change']}")


async def ladder(client: httpx.AsyncClient) -> list[str]:
    return [rung["name"] for rung in (await client.get("/admin/v1/ladder")).json()["rungs"]]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    is_bad = False
    with tempfile.TemporaryDirectory() as folder:
        if args.changes:
            print(f"{args.changes} changes by two operators beside {args.streams} streams")
            with operated_server(Path(folder) / "changes", ROW_SLOTS) as server:
                report = asyncio.run(
                    change_under_load(server.base_url, args.changes, args.streams, args.seed)
                )
            is_bad = report.is_bad
        if args.kills:
            print(f"{args.kills} times kill -9 during PATCH")
            report = Report()
            for line in kill_during_patch(Path(folder) / "kills", args.kills, args.seed):
                report.add(*line)
            is_bad = is_bad or report.is_bad
    print("BAD" if is_bad else "all is well")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
