"""AdminClient against a server on a socket: typed answers, one exception, changes for the revision that was read."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from control_plane.client import AdminClient, AdminError
from control_plane.console_schemas import PAGE_TYPES, PAGES, OverviewPage
from tests.control_plane.conftest import Running, make_config, running
from tests.control_plane.fake_engine import FakeEngine
from tests.control_plane.test_admin_auth import digest

KEYS = {"admin_keys": [digest("operator")], "viewer_keys": [digest("viewer")]}
ALPHA = {"batch_processing": {"alpha": 0.3}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(step_s=0.001), make_config(state_dir="off", **KEYS)) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[AdminClient]:
    with AdminClient(server.base_url, "operator") as found:
        yield found


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> AdminClient:
    """Talks to a server that is none of ours."""
    return AdminClient("http://test", transport=httpx.MockTransport(answer))


def test_every_page_is_its_type(client: AdminClient) -> None:
    for page in PAGES:
        found = client.page(page, "3h")
        assert (type(found), found.page, found.span) == (PAGE_TYPES[page], page, "3h")


def test_a_page_that_has_not_changed_is_given_back(client: AdminClient) -> None:
    first = client.cached_page("overview")
    assert isinstance(first.page, OverviewPage)
    again = client.cached_page("overview", before=first)
    while not again.is_same:  # a tick came in between, every other second
        first, again = again, client.cached_page("overview", before=again)
    assert again.page is first.page


def test_a_change_its_plan_and_the_way_back(client: AdminClient) -> None:
    revision = client.config()["revision"]
    assert [field["path"] for field in client.plan(ALPHA)["fields"]] == ["batch_processing.alpha"]
    made = client.change(ALPHA, revision=revision, reason="calmer")
    assert (made["number"], made["reason"]) == (revision + 1, "calmer")
    with pytest.raises(AdminError, match="stale_revision") as stale:
        client.change({"slo": {"ttft": "9s"}}, revision=revision)
    assert (stale.value.status, stale.value.is_stale, stale.value.revision) == (412, True, revision + 1)
    client.rollback(revision, revision=revision + 1, reason="back")
    assert client.config()["effective"]["batch_processing"]["alpha"] == 0.5
    assert client.audit(limit=1)["data"][0]["event"] == "rollback"
    assert client.verify_audit()["is_ok"]
    assert [r["number"] for r in client.history(limit=2)["data"]] == [revision + 2, revision + 1]


def test_bad_values_are_named(client: AdminClient) -> None:
    with pytest.raises(AdminError, match=r"batch_processing\.alpha") as wrong:
        client.change({"batch_processing": {"alpha": 7}}, revision=client.config()["revision"])
    assert (wrong.value.status, wrong.value.code) == (422, "invalid_config")
    with pytest.raises(AdminError) as missing:
        client.rollback(10**6, revision=client.config()["revision"])
    assert (missing.value.status, missing.value.param) == (404, "revision")
    with pytest.raises(AdminError) as unknown:
        client.request("chatcmpl-none")
    assert unknown.value.status == 404


def test_a_viewer_may_look_and_is_told_when_it_may_not(server: Running) -> None:
    with AdminClient(server.base_url + "/", "viewer") as viewer:
        assert viewer.whoami().role == "viewer"
        assert viewer.plan(ALPHA)["fields"]
        assert viewer.requests().available
        revision = viewer.config()["revision"]
        changes: list[Callable[[], Any]] = [
            lambda: viewer.change(ALPHA, revision=revision),
            lambda: viewer.rollback(1, revision=revision),
            viewer.accept_canary,
            viewer.revert_canary,
            viewer.apply_ladder,
            lambda: viewer.apply_finding("memory_pressure:kv"),
        ]
        for change in changes:
            with pytest.raises(AdminError) as refused:
                change()
            assert refused.value.status == 403
        assert viewer.config()["revision"] == revision
    for key in ("nobody", None):
        with AdminClient(server.base_url, key) as nobody, pytest.raises(AdminError) as refused:
            nobody.config()
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_no_server_and_a_slow_one() -> None:
    with AdminClient("http://127.0.0.1:9", timeout_s=2) as client, pytest.raises(AdminError) as gone:
        client.config()
    assert (gone.value.status, gone.value.code) == (0, "unreachable")

    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(AdminError) as late:
        answering(slow).page("kv")
    assert (late.value.status, late.value.code) == (0, "timeout")


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (httpx.Response(200, content=b"<html>"), 0, "bad_answer"),
        (httpx.Response(200, json=[1]), 0, "bad_answer"),
        (httpx.Response(200, json={"page": "kv"}), 0, "bad_answer"),
        (httpx.Response(304), 0, "bad_answer"),
        (httpx.Response(302, headers={"Location": "http://elsewhere"}), 302, "http_error"),
        (httpx.Response(502, content=b"<html>bad gateway" + b"x" * 10**6), 502, "http_error"),
        (httpx.Response(503, json={"error": "plain"}), 503, "http_error"),
        (
            httpx.Response(503, json={"error": {"message": "m", "code": None}, "revision": "7"}),
            503,
            "http_error",
        ),
        (httpx.Response(429, json={"error": {"code": "c", "message": "m" * 10**5}}), 429, "c"),
    ],
)
def test_what_is_no_answer_of_ours_is_still_one_exception(
    answer: httpx.Response, status: int, code: str
) -> None:
    with pytest.raises(AdminError) as error:
        answering(lambda request: answer).page("kv")
    assert (error.value.status, error.value.code) == (status, code)
    assert len(str(error.value)) < 3000


@pytest.mark.parametrize("key", ["ключ", "two\nlines", "a\x00b"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(AdminError) as error:
        AdminClient("http://test", key)
    assert (error.value.code, key in str(error.value)) == ("bad_key", False)


def test_names_are_quoted() -> None:
    seen: list[bytes] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(404)

    for call in (
        lambda c: c.request("../config?x=1"),
        lambda c: c.apply_finding("kind:a/b"),
    ):
        with pytest.raises(AdminError):
            call(answering(note))
    assert seen == [b"/admin/v1/requests/..%2Fconfig%3Fx%3D1", b"/admin/v1/diagnosis/kind%3Aa%2Fb/apply"]


def test_threads_may_share_one(client: AdminClient) -> None:
    errors: list[Exception] = []

    def look() -> None:
        try:
            for _ in range(5):
                client.page("overview")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
