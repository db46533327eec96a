"""Admin keys: nothing below /admin opens without the right one, whatever the path, the method or the page that asks."""

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from control_plane.app import create_app
from control_plane.console_schemas import PAGES
from control_plane.service import EngineService
from runtime.config import EngineConfig
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
CONFIG = "/admin/v1/config"
PATCH: dict[str, Any] = {"patch": {"batch_processing": {"alpha": 0.25}}}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keyed(**server: Any) -> EngineConfig:
    keys = {
        "api_keys": [digest("api")],
        "admin_keys": [digest("operator")],
        "viewer_keys": [digest("viewer").upper()],
    }
    return make_config(**keys | server)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def admin_paths() -> Iterator[str]:
    """Every admin path of the route table, and some that do not exist."""
    app: FastAPI = create_app(EngineService(make_config()))
    yield from (
        path.replace("{", "").replace("}", "") for path in app.openapi()["paths"] if path.startswith("/admin")
    )
    yield from (
        "/admin",
        "/admin/",
        "/admin/v1",
        "/admin/v1/none",
        "/admin/v2/config",
        "/administrator",
        "/admin/v1/config/",
    )


def test_the_walk_sees_every_route() -> None:
    """A route that is hidden from the schema would be missed by the walks of this file and of test_auth.py."""
    app = create_app(EngineService(make_config()))
    hidden = [r.path for r in app.routes if isinstance(r, APIRoute) and not r.include_in_schema]
    assert set(hidden) <= {"/health"}
    assert {
        CONFIG,
        f"{CONFIG}/plan",
        f"{CONFIG}/rollback",
        "/admin/v1/audit",
        "/admin/v1/canary/revert",
        "/admin/v1/console/page",
        "/admin/v1/requests",
        "/admin/v1/requests/name",
        "/admin/v1/whoami",
    } <= set(admin_paths())


@pytest.mark.parametrize("headers", [{}, bearer("api"), bearer("nobody")])
async def test_no_admin_route_opens_without_an_admin_key(engine: FakeEngine, headers: dict[str, str]) -> None:
    async with in_process(engine, keyed()) as client:
        for path in admin_paths():
            for method in METHODS:
                answer = await client.request(method, path, headers=headers, json=PATCH)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.configuration.taken == []


@pytest.mark.parametrize("headers", [{}, bearer("api")])
@pytest.mark.parametrize(
    "server", [{}, {"demo": True, "host": "0.0.0.0"}, {"demo": True, "host": "10.0.0.7"}]
)
async def test_without_admin_keys_everything_is_refused_with_a_sentence(
    engine: FakeEngine, headers: dict[str, str], server: dict[str, Any]
) -> None:
    config = make_config(api_keys=[digest("api")], **server)
    async with in_process(engine, config, "http://127.0.0.1:8000") as client:
        for path in admin_paths():
            for method in METHODS:
                answer = await client.request(method, path, headers=headers, json=PATCH)
                assert answer.status_code == 403, (method, path)
        answer = await client.get(CONFIG, headers=headers)
        assert "server.admin_keys" in answer.json()["error"]["message"]


async def test_admin_keys_open_nothing_else(engine: FakeEngine) -> None:
    async with in_process(engine, keyed()) as client:
        for key in ("operator", "viewer"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 401
            assert (await client.get("/metrics", headers=bearer(key))).status_code == 401
        assert (await client.get("/v1/models", headers=bearer("api"))).status_code == 200
    both = keyed(api_keys=[digest("operator")])
    async with in_process(engine, both) as client:
        assert (await client.get("/v1/models", headers=bearer("operator"))).status_code == 200


async def test_a_viewer_looks_and_plans(engine: FakeEngine) -> None:
    async with in_process(engine, keyed()) as client:
        headers = bearer("viewer")
        assert (await client.get(CONFIG, headers=headers)).status_code == 200
        assert (await client.post(f"{CONFIG}/plan", json=PATCH, headers=headers)).status_code == 200
        for method, path in (
            ("PATCH", CONFIG),
            ("POST", f"{CONFIG}/rollback"),
            ("POST", f"{CONFIG}/plan/"),
            ("PUT", f"{CONFIG}/plan"),
            ("POST", "/admin/v1/canary/revert"),
            ("DELETE", "/admin/v1/audit"),
        ):
            answer = await client.request(method, path, json=PATCH, headers=headers | {"If-Match": '"1"'})
            assert answer.status_code == 403, (method, path)
    assert engine.configuration.taken == []


async def test_a_viewer_changes_nothing_by_any_route_or_method(engine: FakeEngine) -> None:
    """Every path of the route table with every method but those that read; planning is the one exception."""
    mutating = [method for method in METHODS if method not in ("GET", "HEAD")]
    async with in_process(engine, keyed()) as client:
        headers = bearer("viewer") | {"If-Match": '"1"'}
        for path in admin_paths():
            for method in mutating:
                if (method, path) == ("POST", f"{CONFIG}/plan"):
                    continue
                answer = await client.request(method, path, json=PATCH, headers=headers)
                assert answer.status_code == 403, (method, path)
        assert (await client.get(CONFIG, headers=headers)).json()["revision"] == 1
    assert engine.configuration.taken == []


async def test_reading_routes_change_nothing_for_a_viewer(engine: FakeEngine) -> None:
    """GET answers and leaves no trace, so that letting viewers have it is safe."""
    async with in_process(engine, keyed()) as client:
        headers = bearer("viewer")
        for path in admin_paths():
            answer = await client.get(path, headers=headers)
            assert answer.status_code in (200, 404, 405), (path, answer.text)
        config = (await client.get(CONFIG, headers=headers)).json()
        assert (config["revision"], config["canary"]) == (1, None)
        assert len((await client.get("/admin/v1/audit", headers=headers)).json()["data"]) == 1  # the start
    assert engine.configuration.taken == []


async def test_a_key_is_told_what_it_may_do(engine: FakeEngine) -> None:
    async with in_process(engine, keyed()) as client:
        for key in ("operator", "viewer"):
            answer = await client.get("/admin/v1/whoami", headers=bearer(key))
            assert answer.json() == {"actor": digest(key)[:12], "role": key}
    async with in_process(engine, make_config(demo=True), "http://127.0.0.1:8000") as client:
        assert (await client.get("/admin/v1/whoami")).json() == {"actor": "demo", "role": "operator"}


async def test_the_actor_is_the_keys_digest_never_the_key(engine: FakeEngine) -> None:
    async with in_process(engine, keyed()) as client:
        headers = bearer("operator") | {"If-Match": '"1"', "X-Request-Id": "abc"}
        assert (await client.patch(CONFIG, json=PATCH, headers=headers)).status_code == 200
        entry = (await client.get("/admin/v1/audit", headers=bearer("operator"))).json()["data"][0]
    assert (entry["actor"], entry["request_id"]) == (digest("operator")[:12], "abc")


async def test_digests_are_in_no_answer(engine: FakeEngine) -> None:
    async with in_process(engine, keyed()) as client:
        headers = bearer("operator")
        stolen = {"patch": {"server": {"admin_keys": [digest("thief")]}}}
        answer = await client.patch(CONFIG, json=stolen, headers=headers | {"If-Match": '"1"'})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "server.admin_keys")
        texts = [
            (await client.get(f"/admin/v1/{path}", headers=headers)).text
            for path in (
                "config",
                "config/schema",
                "config/history",
                "audit",
                "whoami",
                "requests",
                "ladder",
                "diagnosis",
                *(f"console/{page}" for page in PAGES),
            )
        ]
    for key in ("api", "operator", "viewer", "thief"):
        assert not any(digest(key) in text.lower() for text in texts), key


async def test_refusals_are_counted_in_the_audit(engine: FakeEngine) -> None:
    process = in_process(engine, keyed())
    async with process as client:
        for _ in range(50):
            await client.get(CONFIG)
        await client.patch(CONFIG, headers=bearer("viewer"))
        process.service.state.audit.flush_refused()
        found = (await client.get("/admin/v1/audit", headers=bearer("viewer"))).json()["data"]
    assert found[0]["counts"] == {"401": 50, "403": 1}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", None, 200),
        ("localhost:8000", None, 200),
        ("LOCALHOST", None, 200),
        ("[::1]:8000", None, 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("evil.example:8000", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("evil@127.0.0.1", None, 200),
        ("[::1", None, 403),
        ("", None, 403),
        ("127.0.0.1:8000", "http://evil.example", 403),
        ("127.0.0.1:8000", "http://127.0.0.1:9999", 403),
        ("127.0.0.1:8000", "https://127.0.0.1:8000", 403),
        ("127.0.0.1:8000", "null", 403),
        ("127.0.0.1:8000", "", 403),
    ],
)
async def test_demo_mode_is_for_this_machine_and_no_foreign_page(
    engine: FakeEngine, host: str, origin: str | None, status: int
) -> None:
    headers = httpx.Headers({"Host": host} | ({"Origin": origin} if origin is not None else {}))
    async with in_process(engine, make_config(demo=True)) as client:
        assert (await client.get(CONFIG, headers=headers)).status_code == status
        changed = await client.patch(CONFIG, json=PATCH, headers=[*headers.raw, (b"If-Match", b'"1"')])
        assert changed.status_code == status
    assert len(engine.configuration.taken) == (status == 200)


async def test_a_page_cannot_post_without_asking_first(engine: FakeEngine) -> None:
    """Text is what a form of another site may send without a preflight, JSON is not."""
    async with in_process(engine, make_config(demo=True), "http://127.0.0.1:8000") as client:
        headers = {"Content-Type": "text/plain", "If-Match": '"1"'}
        answer = await client.post("/admin/v1/config/rollback", content=b'{"revision": 1}', headers=headers)
        assert answer.status_code == 415


async def test_keys_win_over_demo(engine: FakeEngine) -> None:
    async with in_process(engine, keyed(demo=True), "http://127.0.0.1:8000") as client:
        assert (await client.get(CONFIG)).status_code == 401
