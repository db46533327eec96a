"""Live changes over HTTP on the real, tiny engine under load: ladders, compiles, trials, proposals, findings, console."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from control_plane.config_document import checked, document
from control_plane.console_schemas import PAGE_TYPES
from control_plane.merge_patch import merge
from control_plane.request_schemas import RequestTimeline
from runtime.config import EngineConfig
from runtime.engine.change import ChangeKind
from runtime.engine.loop import EngineLoop
from runtime.engine.reconfigure import kind_of
from runtime.ladder.bucket import Bucket
from runtime.ladder.compiler import StepCompiler
from runtime.ladder.late_compiles import monitor
from tests.conformance.random_changes import (
    FIELDS,
    Accepted,
    Operator,
    Rows,
    history,
    lost_updates,
    random_patch,
)
from tests.control_plane.live_engine import CONFIG, CONFIG_PATH, LiveServer, Load, live_server
from tests.patience import until_async
from tests.runtime.engine.test_loop import make_loop

FIVE_ROWS = {
    "batch_processing": {"max_batch_size": 5, "base_batch_size": 5},
    "ladder": {"decode_rows": [1, 4, 5]},
}
ROWS: Rows = ((4, (1, 4)), (4, (4,)), (5, (1, 4)), (6, (1, 4, 6)))
NEEDS_PREFILL_RUNGS = ("ladder.prefill_tokens", "ladder.max_prefill_rows")


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    loop = make_loop(CONFIG)
    loop.start()
    loop.wait_complete(120)
    yield loop
    loop.shutdown()


def lowering(monkeypatch: pytest.MonkeyPatch, before: Callable[[Bucket], None]) -> None:
    """Calls `before` in the compiling thread of every rung; what it raises is the compile's error."""
    lower = StepCompiler._lower_rung

    def lower_rung(self: StepCompiler, bucket: Bucket) -> Any:
        before(bucket)
        return lower(self, bucket)

    monkeypatch.setattr(StepCompiler, "_lower_rung", lower_rung)


async def test_the_old_ladder_serves_until_the_new_rung_is_ready(loop, monkeypatch):
    gate = threading.Event()
    lowering(monkeypatch, lambda bucket: None if gate.wait(30) else pytest.fail("nobody opens the gate"))
    monitor.arm()
    late = monitor.num_late
    try:
        async with live_server(loop) as server, Load(server, num_streams=8) as load:
            made = await server.patch(FIVE_ROWS)
            assert (made.status_code, made.json()["status"]) == (200, "compiling")
            before = server.hits()
            await load.more(20)
            await until_async(lambda: server.hits()["decode-4"] > before["decode-4"])  # told every 0.1 s
            assert "decode-5" not in server.hits()
            assert await server.status(2) == "compiling"
            gate.set()
            await server.is_steady()
            assert await server.status(2) == "applied"
            await until_async(lambda: server.hits()["decode-5"] > 0)
    finally:
        gate.set()
    assert load.errors == []
    assert monitor.num_late == late
    monitor.disarm()


async def test_a_compile_that_fails_leaves_the_old_ladder_and_names_the_rung(loop, monkeypatch):
    def fail(bucket: Bucket) -> None:
        if bucket.rows == 6:
            raise RuntimeError("no such instruction")

    lowering(monkeypatch, fail)
    async with live_server(loop) as server, Load(server, num_streams=4) as load:
        rungs = set(server.hits())
        patch = {
            "batch_processing": {"max_batch_size": 6, "alpha": 0.1},
            "ladder": {"decode_rows": [1, 4, 6]},
        }
        made = (await server.patch(patch)).json()
        assert made["status"] == "compiling"
        await until_async(lambda: server.service.live.revision == 3)
        await load.more(10)
        assert set(server.hits()) == rungs
        assert await server.status(2) == "failed"
        shown = await server.get(CONFIG_PATH)
        assert shown["revision"] == 3
        assert shown["effective"] == shown["stored"]
        assert shown["effective"]["ladder"]["decode_rows"] == [1, 4]
        assert shown["effective"]["batch_processing"]["alpha"] == 0.5
        newest, failed = (await server.get(f"{CONFIG_PATH}/history"))["data"][:2]
        assert "decode-6" in newest["reason"]
        assert "decode-6" in failed["error"]
        assert "no such instruction" in failed["error"]
        monkeypatch.undo()  # the cause is gone: the same change goes through
        assert (await server.patch(patch)).status_code == 200
        await server.is_steady()
        assert "decode-6" in server.hits()
        assert (await server.get("/admin/v1/audit/verify"))["is_ok"]
    assert load.errors == []


async def test_a_failed_compile_is_taken_back_though_a_later_revision_leans_on_it(loop, monkeypatch):
    """Copies were stored for the devices of the revision that fails: without those no start is possible, which is told."""
    gate = threading.Event()

    def fail(bucket: Bucket) -> None:
        assert gate.wait(30)
        raise RuntimeError("no such instruction")

    lowering(monkeypatch, fail)
    async with live_server(loop) as server:
        rungs = {"batch_processing": {"max_batch_size": 3}, "ladder": {"decode_rows": [1, 3]}}
        made = await server.patch(rungs | {"parallel": {"expert_parallel_size": 4}})
        assert made.json()["status"] == "compiling", made.text
        assert (await server.patch({"parallel": {"redundant_experts": 8}})).status_code == 200
        gate.set()
        await until_async(lambda: server.service.live.revision == 4)
        assert await server.status(2) == "failed"
        stored = (await server.get(CONFIG_PATH))["stored"]
        assert stored["ladder"]["decode_rows"] == [1, 4]
        assert (stored["parallel"]["expert_parallel_size"], stored["parallel"]["redundant_experts"]) == (1, 8)
        assert "the next start would fail" in server.service.live.newest.reason
        assert "redundant_experts is 8" in server.service.live.newest.reason
        # By hand the same is still refused.
        refused = await server.patch({"parallel": {"redundant_experts": 7}})
        assert refused.status_code == 422, refused.text
        assert (await server.patch({"parallel": {"redundant_experts": None}})).status_code == 200
        monkeypatch.undo()  # the cause is gone: the ladder goes through
        assert (await server.patch(rungs)).status_code == 200
        await server.is_steady()


async def on_trial(
    server: LiveServer, load: Load, patch: dict[str, Any], metric: str, max_worse_percent: float
) -> str:
    """How a trial of two seconds ends, on what the engine measures.

    A p99 is one stall of the machine: good for what is tenfold worse, and not for what must not look worse.
    """
    await load.more(30)
    spec = {
        "guard_period": "2s", "metric": metric, "max_worse_percent": max_worse_percent, "min_requests": 2,
    }  # fmt: skip

    end = asyncio.get_running_loop().time() + 60
    while (answer := await server.patch(patch, canary=spec)).status_code == 422:
        assert "was seen" in answer.text, answer.text  # too little before: the ring has a sample a second
        assert asyncio.get_running_loop().time() < end, answer.text
        await asyncio.sleep(0.2)
    assert answer.json()["status"] == "canary"
    assert (await server.patch({"slo": {"itl": "9s"}})).status_code == 423
    await until_async(lambda: server.service.live.store.get(2).status not in ("canary", "compiling"))
    return await server.status(2)


async def test_a_trial_that_makes_requests_slower_is_taken_back_by_itself(loop):
    """One row, one step a launch: about ten times slower, far beyond what the machine's noise does."""
    async with live_server(loop) as server, Load(server, num_streams=8, num_tokens=40) as load:
        slow = {"batch_processing": {"base_batch_size": 1}, "ladder": {"max_decode_steps": 1}}
        assert await on_trial(server, load, slow, "e2e_p99", max_worse_percent=50) == "reverted"
        assert server.service.live.revision == 3
        assert loop.config.batch_processing.base_batch_size == 4
        assert loop.config.ladder.max_decode_steps == 8
        assert loop.snapshot().policy.batch_size == 4
        assert "e2e_p99 was" in server.service.live.newest.reason
    assert load.errors == []


async def test_a_trial_that_does_no_harm_is_kept(loop):
    async with live_server(loop) as server, Load(server, num_streams=8) as load:
        harmless = {"controller": {"dwell": "3s"}}
        assert await on_trial(server, load, harmless, "throughput", max_worse_percent=70) == "applied"
        assert server.service.live.revision == 2
        assert loop.config.controller.dwell == 3
    assert load.errors == []


async def test_random_changes_of_two_operators_lose_nothing(loop):
    async with live_server(loop) as server, Load(server, num_streams=6) as load:
        first = await server.get(CONFIG_PATH)
        await load.more(6)
        draw = partial(random_patch, rows_of=ROWS, without=NEEDS_PREFILL_RUNGS)
        operators = [Operator(name, server.client, seed, draw) for seed, name in enumerate("ab")]
        await asyncio.gather(*(operator.run(10) for operator in operators))
        await load.more(6)
        await server.is_steady()
        now = await server.get(CONFIG_PATH)
        accepted = [change for operator in operators for change in operator.accepted]
        revisions = await history(server.client)
        assert len(accepted) >= 10  # of 20; the others changed nothing
        assert lost_updates(accepted, revisions, first["stored"], now["stored"]) == []
        assert (await server.get("/admin/v1/audit/verify"))["is_ok"]

        headers = {"If-Match": f'"{now["revision"]}"'}
        back = await server.client.post(f"{CONFIG_PATH}/rollback", json={"revision": 1}, headers=headers)
        assert back.status_code == 200
        await server.is_steady()
        assert (await server.get(CONFIG_PATH))["effective"] == first["effective"]
        assert loop.config == CONFIG
    assert load.errors == []
    assert {prompt: len(texts) for prompt, texts in load.texts.items()} == dict.fromkeys(load.texts, 1)


async def two_rows_for_long(server: LiveServer) -> None:
    """More than a thousand decode steps of two rows, which rung 4 pads."""
    await asyncio.gather(*(_one_after_another(server, 12) for _ in range(2)))


async def _one_after_another(server: LiveServer, num: int) -> None:
    for _ in range(num):
        await server.ask(200, "ab")


async def test_a_learned_ladder_from_proposal_to_realised_gain(loop):
    async with live_server(loop) as server:
        await two_rows_for_long(server)
        proposal = (await server.get("/admin/v1/ladder"))["proposal"]
        assert "decode-2" in proposal["rungs_to_add"]
        assert proposal["predicted_gain"] > 0.02  # of all demand since the start, that of other tests too
        answer = await server.client.post("/admin/v1/ladder/apply", json={"reason": "two all day"})
        assert answer.status_code == 200, answer.text
        assert (await server.get("/admin/v1/ladder"))["applied"]["realised"] is None
        await server.is_steady()
        await server.get("/admin/v1/ladder")  # what is realised counts from the first look
        await two_rows_for_long(server)
        applied = (await server.get("/admin/v1/ladder"))["applied"]
        assert (applied["status"], applied["is_serving"]) == ("applied", True)
        assert applied["realised"]["num_steps"] > 1000
        assert applied["realised"]["gain"] > 0.1
        assert applied["realised"]["padding"]["decode"] < applied["realised"]["padding_before"]["decode"]


async def test_a_finding_is_applied(loop):
    async with live_server(loop) as server:
        server.look_back()
        await two_rows_for_long(server)
        findings = (await server.get("/admin/v1/diagnosis"))["findings"]
        waste = next(f for f in findings if f["id"] == "padding_waste:decode")
        assert waste["evidence"]["rung"] == "decode-4"
        path = "/admin/v1/diagnosis/padding_waste:decode/apply"
        answer = await server.client.post(path, json={"reason": "as told"})
        assert answer.status_code == 200, answer.text
        assert "decode-2" in answer.json()["plan"]["rungs_to_add"]
        await server.is_steady()
        assert 2 in loop.config.ladder.decode_rows
        server.look_back()
        await two_rows_for_long(server)
        again = (await server.get("/admin/v1/diagnosis"))["findings"]
        assert "padding_waste:decode" not in {finding["id"] for finding in again}


def test_the_random_changes_leave_no_field_out():
    may_change = {
        f"{section}.{name}"
        for section, fields in EngineConfig().model_dump().items()
        for name in fields
        if kind_of(section, name) is not ChangeKind.RESTART
    }
    drawn_together = {"batch_processing.max_batch_size", "ladder.decode_rows"}
    assert may_change == FIELDS.keys() | drawn_together


def test_a_lost_update_is_seen():
    """The check itself: what it must find when a second writer has overwritten the first."""
    start = {"slo": {"itl": "100ms", "ttft": "2s"}}
    accepted = [Accepted(2, "a-0", {"slo": {"itl": "1500ms"}}), Accepted(3, "b-0", {"slo": {"ttft": "3s"}})]
    revisions = [
        {"number": 1, "reason": "first start", "actor": "server", "rolled_back_to": None},
        {"number": 2, "reason": "a-0", "actor": "demo", "rolled_back_to": None},
        {"number": 3, "reason": "b-0", "actor": "demo", "rolled_back_to": None},
    ]
    assert lost_updates(accepted, revisions, start, {"slo": {"itl": "1.5s", "ttft": "3s"}}) == []
    (lost,) = lost_updates(accepted, revisions, start, {"slo": {"itl": "100ms", "ttft": "3s"}})
    assert "slo.itl is 100ms" in lost
    assert lost_updates(accepted, revisions[:2], start, {"slo": {"itl": "1.5s", "ttft": "3s"}})
    assert lost_updates(accepted[:1], revisions, start, {"slo": {"itl": "1.5s", "ttft": "2s"}})


def test_every_random_patch_is_valid():
    rng, found = random.Random(1), document(CONFIG)
    for _ in range(300):
        patch = random_patch(rng, rows_of=ROWS)
        found = document(checked(merge(found, patch)))


async def test_the_console_shows_what_the_engine_does_and_a_requests_own_way(loop):
    async with live_server(loop) as server, Load(server, num_streams=4) as load:
        pages = {}
        body = {
            "model": "tiny",
            "prompt": "once upon a time " * 3,
            "max_tokens": 9,
            "ignore_eos": True,
            "n": 2,
        }
        answer = await server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        found = (await server.get("/admin/v1/requests/mine"))["data"]
        same = (await server.get(f"/admin/v1/requests/{answer.json()['id']}"))["data"]
        assert [data["id"] for data in same] == [data["id"] for data in found]
        await load.more(20)
        num_ticks = server.service.sampler.num_ticks
        await until_async(lambda: server.service.sampler.num_ticks >= num_ticks + 2)
        for page, kind in PAGE_TYPES.items():
            pages[page] = kind.model_validate(await server.get(f"/admin/v1/console/{page}"))
        listed = (await server.get("/admin/v1/requests?limit=500"))["data"]
        assert (await server.client.get("/admin/v1/requests?limit=501")).status_code == 400
        # Switched off by the operator, everything is forgotten and nothing is kept.
        assert (await server.patch({"console": {"request_timeline": False}})).status_code == 200
        off = await server.get("/admin/v1/requests")
        gone = await server.client.get("/admin/v1/requests/mine")
    assert load.errors == []
    traces = [RequestTimeline.model_validate(data) for data in found]
    assert [trace.call_id for trace in traces] == ["mine", "mine"]
    for trace in traces:
        kinds = [event.kind for event in trace.events]
        assert (kinds[0], kinds[-1]) == ("arrived", "finished")
        assert sum(e.tokens for e in trace.events if e.kind == "decode") + 1 == trace.generated_tokens == 9
        assert sum(e.tokens for e in trace.events if e.kind == "prefill") >= 51 - trace.cached_tokens
        assert trace.queue_s + trace.prefill_s == pytest.approx(trace.ttft_s)
        assert trace.ttft_s + trace.decode_s == pytest.approx(trace.e2e_s)
        assert 0 < trace.e2e_s < 60  # found with the answer: the engine had ended it before
        assert set(trace.rungs) <= {rung.name for rung in pages["buckets"].rungs}
        assert abs(trace.arrived - pages["overview"].server_time) < 60
    # Tests before this one sent requests past HTTP, which belong to no call.
    assert sum(bool(row["call_id"]) for row in listed) > 20
    assert not any("once upon" in str(row) for row in (*listed, *found))
    assert (off["available"], off["data"], gone.status_code) == (False, [], 404)
    overview, buckets, experts = pages["overview"], pages["buckets"], pages["experts"]
    assert overview.now.generation_tokens_s > 0
    assert overview.promises.num_requests >= overview.promises.num_kept > 0
    assert sum(rung.hits_span for rung in buckets.rungs) > 0
    assert (experts.num_layers, experts.num_experts) == (2, 8)
    assert sum(map(sum, experts.tokens)) > 0
    assert pages["kv"].levels[0].capacity_bytes > 2**19
    assert pages["economics"].ledger.total.output_tokens > 0
    assert overview.data_age_s < 10


@pytest.mark.parametrize(
    ("patch", "field", "told"),
    [
        ({"experts": {"resident_experts": 9}}, "experts.resident_experts", "is 9; 0 to 8"),
        ({"parallel": {"redundant_experts": 3}}, "parallel.redundant_experts", "is 3; 0 on one device"),
        ({"parallel": {"expert_parallel_size": 9}}, "parallel.expert_parallel_size", "is 9; at most 8"),
        ({"parallel": {"tensor_parallel_size": 3}}, "parallel.tensor_parallel_size", "is 3; it must divide"),
        ({"model": {"max_context": 300}}, "model.max_context", "is 300, the model's own limit is 256"),
        ({"kv_cache": {"kv_cache_size": "100B"}}, "kv_cache.kv_cache_size", "gives 100 bytes"),
    ],
)
async def test_what_no_start_could_serve_is_refused_before_it_is_stored(loop, patch, field, told):
    async with live_server(loop) as server:
        before = await server.get(CONFIG_PATH)
        dry_run = await server.client.post(f"{CONFIG_PATH}/plan", json={"patch": patch})
        made = await server.patch({**patch, "slo": {"ttft": "9s"}})
        for answer in (dry_run, made):
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (422, field), error
            assert told in error["message"]
        assert await server.get(CONFIG_PATH) == before, "not even the field that could be changed"
        assert len((await server.get(f"{CONFIG_PATH}/history"))["data"]) == 1


async def test_what_this_machine_could_not_start_with_is_stored_and_warned_of(loop):
    async with live_server(loop) as server:
        patch = {"parallel": {"expert_parallel_size": 8, "tensor_parallel_size": 2}}
        plan = (await server.client.post(f"{CONFIG_PATH}/plan", json={"patch": patch})).json()
        (warning,) = [text for text in plan["warnings"] if "this machine" in text]
        assert "needs 16 devices, 8 are present" in warning
        assert (await server.patch(patch)).status_code == 200
        assert "parallel.expert_parallel_size" in (await server.get(CONFIG_PATH))["pending_restart"]
        back = await server.patch({"parallel": {"expert_parallel_size": None, "tensor_parallel_size": None}})
        assert back.status_code == 200
        assert (await server.get(CONFIG_PATH))["pending_restart"] == []
