"""Random patches over every field that may change while a server serves, and operators that apply them over HTTP.

Bounds are such that no honest request may fail: whatever is refused or breaks under these changes is a fault.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import httpx

from control_plane.merge_patch import merge

ROW_SLOTS = 16
CONFIG = "/admin/v1/config"

type Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def between(low: int, high: int, unit: str) -> Draw:
    return lambda rng: f"{rng.randint(low, high)}{unit}"


# Ladders come from small sets, or hundreds of changes would be hundreds of compiles.
# max_batch_size and decode_rows must fit each other and are drawn together.
type Rows = tuple[tuple[int, tuple[int, ...]], ...]
ROWS: Rows = (
    (16, ()), (16, (1, 4, 16)), (16, (2, 8, 16)), (8, ()), (8, (1, 2, 4, 8)), (12, (4, 12)), (4, (1, 4)),
)  # fmt: skip
SHARE_OF_ROWS = 0.2
FIELDS: dict[str, Draw] = {
    "server.max_prompt_bytes": one_of(300_000, 400_000),
    "server.max_n": one_of(4, 16, 128),
    "server.max_queued_requests": one_of(256, 512, 4096),
    "server.max_queued_tokens": one_of(1 << 19, 1 << 20),
    "server.queue_timeout": between(60, 300, "s"),
    "server.drain_delay": between(0, 500, "ms"),
    "server.drain_timeout": between(5, 30, "s"),
    "batch_processing.enable_dynamic_batch": one_of(True, False),
    "batch_processing.base_batch_size": one_of(1, 4, 8, 16, 32),
    "batch_processing.dynamic_adjust_window": between(30, 500, "ms"),
    "batch_processing.expert_load_threshold": one_of(0.5, 0.75, 1),
    "batch_processing.micro_batch_size": one_of(1, 4, 16, 32),
    "batch_processing.dynamic_batch_window": between(1, 100, "ms"),
    "batch_processing.max_micro_batch_size": one_of(1, 8, 32),
    "batch_processing.expert_balance_weight": one_of(0.0, 0.25, 0.5),
    "batch_processing.expert_lean_between": one_of(0.0, 0.1),
    "batch_processing.alpha": one_of(0.0, 0.3, 0.5, 1.0),
    "batch_processing.smoothing": one_of(True, False),
    "controller.form": one_of("current", "published"),
    "controller.up_below": one_of(0.5, 0.8, 0.95),
    "controller.down_above": one_of(1.0, 1.2),
    "controller.kv_threshold": one_of(0.5, 0.95),
    "controller.dwell": between(0, 2000, "ms"),
    "controller.stale_after": between(100, 5000, "ms"),
    "controller.expected_len_quantile": one_of(0.5, 0.9, 0.99),
    "controller.ttft_slack": one_of(0, 0.5, 1),
    "controller.like_lengths": one_of(True, False),
    "controller.length_multiple": one_of(1, 64, 256),
    "experts.sleep_after": between(1, 600, "s"),
    "experts.swaps_per_step": one_of(1, 4, 16),
    "experts.wake_margin": one_of(0.0, 0.1, 0.5),
    "slo.ttft": between(1, 4000, "ms"),
    "slo.itl": between(1, 500, "ms"),
    "kv_cache.enable_prefix_cache": one_of(True, False),
    "parallel.judge_overlap_in_traffic": one_of(True, False),
    "precision.dynamic_precision": one_of(True, False),
    "precision.load_threshold": one_of(0.5, 0.85),
    "traffic_prediction.enable_traffic_prediction": one_of(True, False),
    "traffic_prediction.prediction_window": between(60, 900, "s"),
    "ladder.max_rungs": one_of(8, 24),
    "ladder.max_decode_steps": one_of(1, 2, 4, 8, 16),
    "ladder.prefill_tokens": one_of([], [64, 256], [32, 128, 256]),
    "ladder.max_prefill_rows": one_of(4, 8),
    "console.request_timeline": one_of(True, False),
    "parallel.moves_per_step": one_of(1, 2, 8),
    "parallel.exchange": one_of("auto", "gather", "all_to_all"),
    "parallel.gather_max_tokens": one_of(32, 64, 128),
    "economics.input_price": one_of(0.0, 0.55),
    "economics.cached_input_price": one_of(0.0, 0.14),
    "economics.output_price": one_of(0.0, 2.19),
    "economics.worker_price": one_of(0.0, 16.0),
    "economics.effective_from": one_of("", "2026-12-01T00:00:00Z"),
}
MAX_FIELDS = 3


def random_patch(rng: random.Random, rows_of: Rows = ROWS, without: Collection[str] = ()) -> dict[str, Any]:
    """A merge patch of a few fields. rows_of: pairs of max_batch_size and decode_rows; without: paths to leave alone."""
    patch: dict[str, Any] = {}
    if rng.random() < SHARE_OF_ROWS:
        max_rows, rows = rng.choice(rows_of)
        patch = {"batch_processing": {"max_batch_size": max_rows}, "ladder": {"decode_rows": list(rows)}}
    for path in rng.sample(sorted(FIELDS.keys() - set(without)), rng.randint(1, MAX_FIELDS)):
        section, name = path.split(".")
        patch.setdefault(section, {})[name] = FIELDS[path](rng)
    return patch


@dataclass(frozen=True, slots=True)
class Accepted:
    """A change that was answered with 200."""

    number: int
    reason: str
    patch: dict[str, Any]


class Operator:
    """Applies random changes one after another; reads again and retries when somebody was quicker."""

    def __init__(
        self,
        name: str,
        client: httpx.AsyncClient,
        seed: int,
        draw: Callable[[random.Random], dict[str, Any]] = random_patch,
    ) -> None:
        self.name, self._client, self._rng, self._draw = name, client, random.Random(seed), draw
        self.accepted: list[Accepted] = []
        self.statuses: Counter[int] = Counter()

    async def run(self, num_changes: int) -> None:
        """Until `num_changes` patches were answered with 200."""
        for i in range(num_changes):
            await self.change(self._draw(self._rng), f"{self.name}-{i}")

    async def change(self, patch: dict[str, Any], reason: str) -> None:
        """Raises RuntimeError when the change is refused for another cause than somebody's being quicker."""
        tag = (await self._client.get(CONFIG)).headers["etag"]
        while True:
            body = {"patch": patch, "reason": reason}
            answer = await self._client.patch(CONFIG, json=body, headers={"If-Match": tag})
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                break
            if answer.status_code != 412:
                raise RuntimeError(f"{patch}: {answer.status_code} {answer.text}")
            tag = f'"{answer.json()["revision"]}"'
        made = answer.json()
        if made["reason"] == reason:  # else nothing differed, and no revision was made
            self.accepted.append(Accepted(made["number"], reason, patch))


async def history(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Every kept revision, oldest first."""
    found: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        query = {"limit": 100} | ({"before": before} if before else {})
        page = (await client.get(f"{CONFIG}/history", params=query)).json()
        found += page["data"]
        before = page["before"]
        if before is None:
            return found[::-1]


def lost_updates(
    accepted: list[Accepted], revisions: list[dict[str, Any]], start: dict[str, Any], now: dict[str, Any]
) -> list[str]:
    """What is wrong with the history: each accepted change is there once, and all together give what is stored.

    start, now: the stored documents of the oldest revision and after the newest.
    """
    problems = []
    numbers = [revision["number"] for revision in revisions]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        problems.append(f"the history has gaps or doubles: {numbers}")
    by_reason = Counter(revision["reason"] for revision in revisions)
    by_number = {revision["number"]: revision for revision in revisions}
    for change in accepted:
        revision = by_number.get(change.number)
        if revision is None or revision["reason"] != change.reason or by_reason[change.reason] != 1:
            problems.append(f"{change.reason} was accepted as revision {change.number}: {revision}")
    if len(accepted) != sum(r["actor"] != "server" and r["rolled_back_to"] is None for r in revisions):
        problems.append(f"{len(accepted)} changes were accepted; the history: {by_reason}")
    expected = start
    for change in sorted(accepted, key=lambda change: change.number):
        expected = merge(expected, change.patch)
    for section, fields in now.items():
        for name, value in fields.items():
            if value != _stored(expected[section][name]):
                problems.append(
                    f"{section}.{name} is {value}, the last accepted is {expected[section][name]}"
                )
    return problems


def _stored(value: Any) -> Any:
    """A value of a patch as a document writes it: durations from one second on in seconds."""
    if isinstance(value, str) and value.endswith("ms") and value[:-2].isdigit():
        from runtime.config_values import duration_text, parse_duration

        return duration_text(parse_duration(value))
    return value
