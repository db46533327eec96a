"""Keys: every route and method is refused without one, but for the health routes. Admin: test_admin_auth.py."""

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from control_plane.app import create_app
from control_plane.service import EngineService
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine

KEYS = ("first", "second")
OPEN = {"/health/live", "/health/ready"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def digests() -> list[str]:
    return [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]


def every_path() -> Iterator[str]:
    """All paths of the schema and some that only exist in part or not at all."""
    app = create_app(EngineService(make_config()))
    yield from (
        path.replace("{name}", "x").replace("{completion_id}", "x") for path in app.openapi()["paths"]
    )
    yield from (
        "/",
        "/openapi.json",
        "/docs",
        "/v1/tokenize",
        "/v1/none",
        "/health/live/",
        "//health/live",
        "/metrics/",
    )


async def test_every_route_and_method_needs_a_key(engine: FakeEngine) -> None:
    paths = list(every_path())
    assert {"/v1/chat/completions", "/v1/models/x", "/metrics", "/version", *OPEN} <= set(paths)
    async with in_process(engine, make_config(api_keys=digests())) as client:
        for path in paths:
            for method in METHODS:
                answer = await client.request(method, f"http://test{path}")
                if path.startswith("/admin"):
                    assert answer.status_code == 403, (method, path)
                    continue
                if path in OPEN:
                    assert answer.status_code in (200, 405), (method, path)
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.submitted == []


@pytest.mark.parametrize("header", ["Bearer first", "bearer second", "Bearer  first"])
async def test_known_keys_pass(engine: FakeEngine, header: str) -> None:
    async with in_process(engine, make_config(api_keys=digests())) as client:
        assert (await client.get("/v1/models", headers={"Authorization": header})).status_code == 200


@pytest.mark.parametrize(
    "header", ["", "first", "Basic first", "Bearer", "Bearer third", "Bearer " + "x" * 9999]
)
async def test_others_do_not(engine: FakeEngine, header: str) -> None:
    async with in_process(engine, make_config(api_keys=digests())) as client:
        answer = await client.get("/v1/models", headers={"Authorization": header})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_two_keys_in_one_request_are_refused(engine: FakeEngine) -> None:
    async with in_process(engine, make_config(api_keys=digests())) as client:
        both = httpx.Headers([("Authorization", "Bearer wrong"), ("Authorization", "Bearer first")])
        assert (await client.get("/v1/models", headers=both)).status_code == 401


async def test_stored_completions_belong_to_their_key(engine: FakeEngine) -> None:
    async with in_process(engine, make_config(api_keys=digests())) as client:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in KEYS)
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "store": True}
        made = (await client.post("/v1/chat/completions", json=body, headers=mine)).json()
        url = f"/v1/chat/completions/{made['id']}"
        assert (await client.get(url, headers=mine)).status_code == 200
        assert (await client.get(url, headers=other)).status_code == 404
        assert (await client.get("/v1/chat/completions", headers=other)).json()["data"] == []


async def test_what_callers_say_of_their_traffic_is_theirs_alone(engine: FakeEngine) -> None:
    """Neither another's word nor another's key id can be taken."""
    ids = [digest[:12] for digest in digests()]
    async with in_process(engine, make_config(api_keys=digests())) as client:
        for key in KEYS:
            for metadata in ({"traffic_key": "code"}, {"traffic_key": ids[0]}, {}):
                body = {"model": "fake", "prompt": "x", "max_tokens": 1, "metadata": metadata}
                headers = {"Authorization": f"Bearer {key}"}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    found = [request.traffic_key for request in engine.submitted]
    assert found == [word for own in ids for word in (f"{own}:code", f"{own}:{ids[0]}", own)]
