"""/admin/v1 over HTTP: statuses and bodies that operators and their scripts rely on."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from runtime.engine.stats import ITL_BOUNDS_S, Histogram
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine
from tests.patience import until_async

CONFIG = "/admin/v1/config"
URL = "http://127.0.0.1:8000"


@pytest.fixture
async def admin(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(engine, make_config(demo=True), URL) as found:
        yield found


async def patch(
    client: httpx.AsyncClient, changes: dict[str, Any], revision: int | str, **body: Any
) -> httpx.Response:
    headers = {"If-Match": revision if isinstance(revision, str) else f'"{revision}"'}
    return await client.patch(CONFIG, json={"patch": changes} | body, headers=headers)


def alpha(value: float) -> dict[str, Any]:
    return {"batch_processing": {"alpha": value}}


async def test_config_says_what_is_in_force_stored_and_default(admin: httpx.AsyncClient) -> None:
    answer = await admin.get(CONFIG)
    body = answer.json()
    assert (answer.headers["etag"], body["revision"], body["status"]) == ('"1"', 1, "applied")
    assert body["effective"] == body["stored"]
    assert body["effective"]["model"]["aliases"] == ["gpt-alias"]
    assert body["defaults"]["model"]["aliases"] == []
    assert (body["pending_restart"], body["problem"], body["survives_restart"]) == ([], None, False)
    assert body["num_keys"] == {"api": 0, "admin": 0, "viewer": 0}
    await patch(admin, {"ladder": {"max_prefill_tokens": 256}}, 1)
    body = (await admin.get(CONFIG)).json()
    assert body["pending_restart"] == ["ladder.max_prefill_tokens"]
    assert (
        body["effective"]["ladder"]["max_prefill_tokens"],
        body["stored"]["ladder"]["max_prefill_tokens"],
    ) == (
        512,
        256,
    )


async def test_what_was_read_may_be_sent_back_whole(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    stored = (await admin.get(CONFIG)).json()["stored"]
    stored["slo"]["itl"] = "70ms"
    answer = await patch(admin, stored, 1)
    assert [change["path"] for change in answer.json()["changes"]] == ["slo.itl"]


async def test_the_schema_is_served(admin: httpx.AsyncClient) -> None:
    found = (await admin.get(f"{CONFIG}/schema")).json()
    field = found["$defs"]["PrecisionConfig"]["properties"]["low_precision"]
    assert (field["change"], field["has_effect"], bool(field["reason"])) == ("restart", False, True)


async def test_a_plan_shows_and_a_patch_does(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"patch": {"batch_processing": {"max_batch_size": 48}}, "reason": "more rows"}
    plan = (await admin.post(f"{CONFIG}/plan", json=body)).json()
    assert plan == {
        "revision": 1,
        "fields": [{"path": "batch_processing.max_batch_size", "kind": "recompile", "old": 32, "new": 48}],
        "rungs_to_add": ["decode-48"],
        "rungs_to_drop": ["decode-32"],
        "compile_s": 1.5,
        "temp_bytes": 1024,
        "warnings": [],
    }
    assert engine.configuration.taken == []
    answer = await patch(admin, body["patch"], 1, reason="more rows")
    made = answer.json()
    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert (made["number"], made["status"], made["actor"], made["reason"]) == (
        2,
        "applied",
        "demo",
        "more rows",
    )
    assert made["changes"] == plan["fields"]
    assert engine.config.batch_processing.max_batch_size == 48


async def test_a_live_limit_holds_for_the_next_request(admin: httpx.AsyncClient) -> None:
    ask = {"model": "fake", "prompt": "ab", "n": 4}
    assert (await admin.post("/v1/completions", json=ask)).status_code == 200
    await patch(admin, {"server": {"max_n": 2}}, 1)
    assert (await admin.post("/v1/completions", json=ask)).status_code == 400
    headers = {"If-Match": '"2"'}
    await admin.post(f"{CONFIG}/rollback", json={"revision": 1}, headers=headers)
    assert (await admin.post("/v1/completions", json=ask)).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ({"patch": alpha(0.1)}, {}, 428, "precondition_required"),
        ({"patch": alpha(0.1)}, {"If-Match": "*"}, 428, "precondition_required"),
        ({"patch": alpha(0.1)}, {"If-Match": '"7"'}, 412, "stale_revision"),
        ({"patch": alpha(0.1)}, {"If-Match": 'W/"1"'}, 412, "stale_revision"),
        ({"patch": alpha(0.1)}, {"If-Match": '"²"'.encode()}, 412, "stale_revision"),
        ({"patch": alpha(0.1)}, {"If-Match": '"' + "9" * 400 + '"'}, 412, "stale_revision"),
        ({"patch": alpha(7)}, {"If-Match": '"1"'}, 422, "invalid_config"),
        ({"patch": {"batch_procesing": {}}}, {"If-Match": '"1"'}, 422, "invalid_config"),
        ({"patch": []}, {"If-Match": '"1"'}, 422, "invalid_type"),
        ({"patch": {}, "dry_run": True}, {"If-Match": '"1"'}, 422, "invalid_value"),
        ({"patch": {}, "reason": "x" * 501}, {"If-Match": '"1"'}, 422, "invalid_value"),
        ({}, {"If-Match": '"1"'}, 422, "missing_required_parameter"),
        (b"{", {"If-Match": '"1"'}, 400, "invalid_json"),
        (b"[" * 2000, {"If-Match": '"1"'}, 400, "invalid_json"),
        (b'{"patch":' + b'{"a":' * 900 + b"1" + b"}" * 901, {"If-Match": '"1"'}, 422, "invalid_config"),
        (b'{"patch": {"slo": {"ttft": 1e999}}}', {"If-Match": '"1"'}, 400, "invalid_json"),
    ],
)
async def test_refusals(
    admin: httpx.AsyncClient, engine: FakeEngine, body: Any, headers: dict[str, Any], status: int, code: str
) -> None:
    content = body if isinstance(body, bytes) else None
    headers = {"Content-Type": "application/json"} | headers
    answer = await admin.patch(CONFIG, json=None if content else body, content=content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert error["message"]
    if status == 412:
        assert answer.json()["revision"] == 1
    assert engine.configuration.taken == []
    assert (await admin.get(CONFIG)).json()["revision"] == 1


async def test_an_unknown_key_names_the_nearest(admin: httpx.AsyncClient) -> None:
    answer = await patch(admin, {"batch_processing": {"aplha": 0.1}}, 1)
    assert "batch_processing.alpha" in answer.json()["error"]["message"]


async def test_history_and_audit_come_in_pages(admin: httpx.AsyncClient) -> None:
    for i in range(1, 6):
        assert (await patch(admin, alpha(i / 10), i)).status_code == 200
    first = (await admin.get(f"{CONFIG}/history", params={"limit": 3})).json()
    assert [r["number"] for r in first["data"]] == [6, 5, 4]
    rest = (await admin.get(f"{CONFIG}/history", params={"limit": 3, "before": first["before"]})).json()
    assert [r["number"] for r in rest["data"]] == [3, 2, 1]
    assert rest["before"] is None
    assert [r["changes"][0]["new"] for r in first["data"]] == [0.5, 0.4, 0.3]
    audit = (await admin.get("/admin/v1/audit", params={"limit": 2})).json()
    assert [e["number"] for e in audit["data"]] == [6, 5]
    check = (await admin.get("/admin/v1/audit/verify")).json()
    assert (check["is_ok"], check["last"]) == (True, 6)
    for bad in ({"limit": 0}, {"limit": 101}, {"before": 0}, {"before": 1 << 60}):
        assert (await admin.get("/admin/v1/audit", params=bad)).status_code == 400


async def test_rollback(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    await patch(admin, alpha(0.1), 1)
    url = f"{CONFIG}/rollback"
    assert (await admin.post(url, json={"revision": 1})).status_code == 428
    assert (await admin.post(url, json={"revision": 1}, headers={"If-Match": '"1"'})).status_code == 412
    assert (await admin.post(url, json={"revision": 9}, headers={"If-Match": '"2"'})).status_code == 404
    start = asyncio.get_running_loop().time()
    answer = await admin.post(url, json={"revision": 1, "reason": "worse"}, headers={"If-Match": '"2"'})
    assert asyncio.get_running_loop().time() - start < 5
    assert (answer.json()["number"], answer.json()["rolled_back_to"]) == (3, 1)
    assert engine.config.batch_processing.alpha == 0.5


async def test_decisions_are_read_on_from_a_number(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    for i in range(5):
        engine.configuration.decide("batch_size", "load_low", i, i + 1)
    found = (await admin.get("/admin/v1/decisions", params={"after": 2, "limit": 2})).json()["data"]
    assert [(d["number"], d["reason"], d["inputs"]) for d in found] == [
        (3, "load_low", {"load": 0.5}),
        (4, "load_low", {"load": 0.5}),
    ]


async def test_a_trial_over_http(engine: FakeEngine) -> None:
    engine.histograms["itl_s"] = itl = Histogram(ITL_BOUNDS_S)
    process = in_process(engine, make_config(demo=True), URL)
    async with process as admin:
        live = process.service.live_config
        assert live is not None
        await live.tick()
        itl.observe(0.05, 100)
        canary = {"guard_period": "60s", "metric": "itl_p99"}
        for wrong in ({"guard_period": 60}, {"guard_period": "2h"}, {"metric": "mood"}, {"min_requests": 0}):
            assert (await patch(admin, alpha(0.1), 1, canary=canary | wrong)).status_code == 422
        answer = await patch(admin, alpha(0.1), 1, canary=canary)
        assert (answer.status_code, answer.json()["status"]) == (200, "canary")
        body = (await admin.get("/admin/v1/canary")).json()["canary"]
        assert (body["revision"], body["spec"]["metric"], body["before"]["num_seen"]) == (2, "itl_p99", 100)
        assert 0 < body["left_s"] <= 60
        assert (await patch(admin, alpha(0.2), 2)).status_code == 423
        answer = await admin.post("/admin/v1/canary/revert", json={"reason": "felt slow"})
        assert (answer.json()["number"], answer.headers["etag"]) == (3, '"3"')
        assert (await admin.post("/admin/v1/canary/accept", json={})).status_code == 404
        assert (await admin.get("/admin/v1/canary")).json() == {"canary": None}
    assert engine.config.batch_processing.alpha == 0.5


async def test_the_ticker_takes_back_what_cannot_be_compiled(
    admin: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.configuration.compiles_at_once = False
    answer = await patch(admin, {"batch_processing": {"max_batch_size": 64}}, 1)
    assert answer.json()["status"] == "compiling"
    assert "moe_ladder_state" in (await admin.get("/metrics")).text
    engine.configuration.end_compile("decode-64: out of memory")
    await until_async(lambda: engine.config.batch_processing.max_batch_size == 32)
    found = (await admin.get(f"{CONFIG}/history")).json()["data"]
    await until_async(lambda: engine.configuration.config.batch_processing.max_batch_size == 32)
    assert "decode-64" in found[0]["reason"]


async def test_while_the_model_loads(engine: FakeEngine) -> None:
    process = in_process(engine, make_config(demo=True), URL)
    process.service.live_config = None
    async with process as admin:
        answer = await admin.get(CONFIG)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_two_operators_lose_nothing(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    """200 changes of one number by two clients, each adding 1 to what it read: the sum must be right."""

    async def operate(name: str, rng: random.Random) -> int:
        num_tries = 0
        for _ in range(100):
            while True:
                num_tries += 1
                now = (await admin.get(CONFIG)).json()
                rows = now["effective"]["batch_processing"]["base_batch_size"]
                extra = rng.choice(
                    [alpha(round(rng.random(), 3)), {"slo": {"itl": f"{rng.randint(20, 200)}ms"}}, {}]
                )
                both = {
                    **extra,
                    "batch_processing": {**extra.get("batch_processing", {}), "base_batch_size": rows + 1},
                }
                answer = await patch(admin, both, now["revision"], reason=name)
                if answer.status_code == 200:
                    break
                assert answer.status_code == 412
        return num_tries

    num_tries = sum(
        await asyncio.gather(operate("first", random.Random(1)), operate("second", random.Random(2)))
    )
    body = (await admin.get(CONFIG)).json()
    assert body["effective"]["batch_processing"]["base_batch_size"] == 32 + 200
    assert body["revision"] == 201
    assert num_tries > 200  # they did get in each other's way
    assert (await admin.get("/admin/v1/audit/verify")).json()["is_ok"]
    assert [c.batch_processing.base_batch_size for c in engine.configuration.taken] == list(range(33, 233))
