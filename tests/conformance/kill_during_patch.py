"""kill -9 of the real server in the middle of PATCHes by two operators; then its files and the next start are looked at."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from control_plane.audit import AuditLog
from control_plane.config_store import ConfigStore
from runtime.config_values import parse_duration
from tests.conformance.operated_server import OperatedServer, operated_server
from tests.conformance.random_changes import CONFIG

ONE_RUNG_EACH = {"decode_rows": [4], "prefill_tokens": [64]}
LONGEST_S = 0.1

type Line = tuple[str, object, bool]


class Counting:
    """An operator whose n-th change sets its two fields to n. `acknowledged` is the last that was answered with 200."""

    def __init__(self, name: str, section: str, fields: tuple[str, str], begin: int) -> None:
        self.name, self.section, self.fields = name, section, fields
        self.acknowledged = begin
        self.problem = ""

    def patch(self, number: int) -> dict[str, dict[str, str]]:
        return {self.section: {name: f"{number}ms" for name in self.fields}}

    def change_on(self, root: str) -> None:
        """Until the server is gone."""
        try:
            with httpx.Client(base_url=root, timeout=20) as client:
                while not self.problem:
                    tag = client.get(CONFIG).headers["etag"]
                    body = {"patch": self.patch(self.acknowledged + 1), "reason": self.name}
                    answer = client.patch(CONFIG, json=body, headers={"If-Match": tag})
                    if answer.status_code == 200:
                        self.acknowledged += 1
                    elif answer.status_code != 412:
                        self.problem = answer.text[:300]
        except httpx.TransportError:
            return

    def check(self, stored: dict[str, dict[str, str]]) -> str:
        """What is wrong with the values after a kill; takes over what was stored without an answer."""
        found = [round(1000 * parse_duration(stored[self.section][name])) for name in self.fields]
        if found[0] != found[1]:
            return f"{self.name}: half a change is stored: {found}"
        if found[0] not in (self.acknowledged, self.acknowledged + 1):
            return f"{self.name}: {found[0]} is stored, {self.acknowledged} was acknowledged"
        self.acknowledged = found[0]
        return self.problem


def kill_during_patch(folder: Path, num_kills: int, seed: int) -> Iterator[Line]:
    """A line for each kill, and one for the last start."""
    rng = random.Random(seed)
    operators = [
        Counting("slo", "slo", ("ttft", "itl"), 100),
        Counting("windows", "batch_processing", ("dynamic_adjust_window", "dynamic_batch_window"), 100),
    ]
    with operated_server(folder, 4, ONE_RUNG_EACH) as server:
        start = {operator.section: operator.patch(100)[operator.section] for operator in operators}
        answer = httpx.patch(server.root + CONFIG, json={"patch": start}, headers={"If-Match": '"1"'})
        answer.raise_for_status()
        _patch_and_kill(server, operators, rng.uniform(0, LONGEST_S))
    for i in range(1, num_kills + 1):
        before = [operator.acknowledged for operator in operators]
        problem = _of_the_folder(folder / "state")
        with operated_server(folder, 4, ONE_RUNG_EACH) as server:
            problem = problem or _of_the_start(server, operators)
            if i < num_kills:
                _patch_and_kill(server, operators, rng.uniform(0, LONGEST_S))
        yield f"kill {i}, changes acknowledged {before}", problem or "whole", not problem


def _patch_and_kill(server: OperatedServer, operators: list[Counting], delay_s: float) -> None:
    """kill -9 `delay_s` after both operators' first change of this round."""
    begin = [operator.acknowledged for operator in operators]
    threads = [threading.Thread(target=o.change_on, args=(server.root,)) for o in operators]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while any(o.acknowledged == b for o, b in zip(operators, begin, strict=True)) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(delay_s)
    server.process.kill()
    for thread in threads:
        thread.join(30)


def _of_the_folder(state: Path) -> str:
    """What is wrong with the files, before any server repairs them."""
    store = ConfigStore(state)
    numbers = [revision.number for revision in store.page(None, 1 << 30)]
    if store.damaged:
        return f"damaged: {store.damaged}"
    if numbers != list(range(numbers[0], numbers[-1] - 1, -1)):
        return f"revisions are missing: {numbers}"
    check = AuditLog(state).verify()
    return "" if check.is_ok else f"audit: {check.problem}"


def _of_the_start(server: OperatedServer, operators: list[Counting]) -> str:
    with httpx.Client(base_url=server.root, timeout=20) as client:
        body = client.get(CONFIG).json()
        if body["problem"]:
            return f"problem: {body['problem']}"
        check = client.get("/admin/v1/audit/verify").json()
        if not check["is_ok"]:
            return f"audit: {check['problem']}"
        problems = [operator.check(body["stored"]) for operator in operators]
        if body["stored"]["slo"] != body["effective"]["slo"]:
            problems.append("what is stored is not in force")
        return "; ".join(p for p in problems if p)
