"""Pages over a real server, without a browser: what they say, and what an operator's clicks do to the engine."""

import json
from collections.abc import Callable, Iterator
from typing import cast

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from control_plane.client import AdminClient
from control_plane.console_schemas import BucketsPage, RungRow
from tests.conformance.operated_server import OperatedServer
from tests.patience import until
from tests.ui.conftest import texts
from ui.frame import PAGE_NAMES

WINDOW = "batch_processing.dynamic_adjust_window"
type OpenPage = Callable[[str], AppTest]


@pytest.fixture(autouse=True)
def _as_before(admin: AdminClient) -> Iterator[None]:
    """Every test leaves the configuration as it found it, so that their order does not matter."""
    before = admin.config()["revision"]
    yield
    found = admin.config()["revision"]
    if found != before:
        admin.rollback(before, revision=found)


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_every_page_draws_and_knows_the_server(
    open_page: OpenPage, server: OperatedServer, name: str
) -> None:
    page = open_page(name)
    assert not page.exception
    assert not page.error
    assert page.title[0].value == PAGE_NAMES[name]
    assert f"**Connected** · {server.root.removeprefix('http://')}" in texts(page)


def test_plots_hold_what_the_server_says(
    open_page: OpenPage, server: OperatedServer, admin: AdminClient
) -> None:
    _ask(server, 12)
    until(lambda: any(rung.hits_span for rung in _rungs(admin)))

    def drawn_and_said() -> tuple[AppTest, list[RungRow]] | None:
        """Both of one moment: the server may look at its engine between the two questions."""
        before, page = _rungs(admin), open_page("buckets")
        return (page, before) if before == _rungs(admin) else None

    page, rungs = until(drawn_and_said)
    figures = {spec["layout"]["title"]["text"]: spec for spec in _figures(page)}
    asked, padding = figures["Use of each rung (rung · launches)"]["data"]
    used = [rung for rung in rungs if rung.hits_span]
    assert [name.split()[0] for name in asked["y"]] == [rung.name for rung in used]
    assert asked["x"] == pytest.approx([100 * (rung.occupancy_span or 0) for rung in used])
    assert [a + p for a, p in zip(asked["x"], padding["x"], strict=True)] == pytest.approx([100] * len(used))


def test_a_change_goes_from_the_form_to_the_engine_and_back(open_page: OpenPage, admin: AdminClient) -> None:
    page = open_page("tuning")
    _planned(page, WINDOW, "300ms")
    assert admin.config()["effective"]["batch_processing"]["dynamic_adjust_window"] == "500ms", "a dry run"
    assert f"`{WINDOW}`: 500ms → **300ms** · live" in texts(page)
    page.text_input(key="why").set_value("calmer").run()
    page.button(key="apply").click().run()
    page.button(key="confirm").click().run()
    assert admin.config()["effective"]["batch_processing"]["dynamic_adjust_window"] == "300ms"
    newest = admin.history()["data"][0]
    assert (newest["reason"], newest["actor"]) == ("calmer", "demo")
    assert "It is in force." in texts(page)
    page.button(key="undo").click().run()
    page.button(key="confirm_back").click().run()
    assert admin.config()["effective"]["batch_processing"]["dynamic_adjust_window"] == "500ms"
    assert admin.history()["data"][0]["rolled_back_to"] == newest["number"] - 1


def test_a_field_goes_back_to_its_default(open_page: OpenPage, admin: AdminClient) -> None:
    admin.change({"slo": {"ttft": "3s"}}, revision=admin.config()["revision"])
    page = open_page("tuning")
    page.selectbox(key="section").set_value("slo").run()
    box = next(m for m in page.multiselect if m.label == "Set back to the default")
    box.set_value(["slo.ttft"])
    _plan(page)
    assert "`slo.ttft`: 3s → **2s** · live" in texts(page)


def test_a_plan_shows_rungs_seconds_and_memory(open_page: OpenPage) -> None:
    page = open_page("tuning")
    page.selectbox(key="section").set_value("ladder").run()
    _planned(page, "ladder.decode_rows", "1, 2, 4")
    told = texts(page)
    assert "Rungs to add: **decode-2**" in told
    assert "to compile" in told


def test_wrong_input_is_told_and_sends_nothing(open_page: OpenPage, admin: AdminClient) -> None:
    page = open_page("tuning")
    _planned(page, WINDOW, "500")
    assert "a duration such as" in texts(page)
    assert "Your change" in texts(page)
    assert not any(button.key == "apply" for button in page.button)


def test_what_only_the_server_knows_to_be_wrong_is_told(open_page: OpenPage) -> None:
    page = open_page("tuning")
    page.selectbox(key="section").set_value("ladder").run()
    _planned(page, "ladder.decode_rows", "1, 999")
    assert "It cannot be done" in texts(page)
    assert "999" in texts(page)


def test_two_operators_see_each_other_and_nobody_is_overwritten(
    open_page: OpenPage, admin: AdminClient
) -> None:
    page = open_page("tuning")
    _planned(page, WINDOW, "300ms")
    revision = admin.config()["revision"]
    other = {"batch_processing": {"dynamic_adjust_window": "700ms", "alpha": 0.4}}
    admin.change(other, revision=revision, reason="the other one")
    page.button(key="apply").click().run()
    assert not any(button.key == "confirm" for button in page.button)
    assert "Somebody else changed it since" in texts(page)
    rows = next(d.value for d in page.dataframe if "yours" in d.value.columns).to_dict("records")
    assert {
        "field": WINDOW,
        f"base ({revision})": "500ms",
        f"theirs ({revision + 1})": "700ms",
        "yours": "300ms",
    } in rows
    page.radio(key=f"choice_{WINDOW}").set_value("yours").run()
    page.button(key="rebase").click().run()
    page.button(key="apply").click().run()
    page.button(key="confirm").click().run()
    found = admin.config()["effective"]["batch_processing"]
    assert (found["dynamic_adjust_window"], found["alpha"]) == ("300ms", 0.4), "their other change stays"


def test_a_reason_is_text_and_nothing_else(open_page: OpenPage, admin: AdminClient) -> None:
    """A picture in somebody's reason would be fetched by every operator's browser."""
    patch = {"batch_processing": {"alpha": 0.45}}
    admin.change(
        patch, revision=admin.config()["revision"], reason="![x](http://elsewhere/x.png) :red[y] $z$"
    )
    page = open_page("tuning")
    said = [str(m.value) for m in page.markdown if "elsewhere" in str(m.value)]
    assert said
    assert all("![x]" not in text and ":red[y]" not in text and "\\!\\[x" in text for text in said)


def test_a_request_shows_its_own_way(open_page: OpenPage) -> None:
    page = open_page("playground")
    page.number_input(key="max_tokens").set_value(6)
    next(button for button in page.button if button.label == "Send").click().run()
    assert not page.error
    told = texts(page)
    assert "first token after" in told
    assert "Launches: " in told
    titles = [spec["layout"]["title"]["text"] for spec in _figures(page)]
    assert titles == ["This request's way through the engine", "Gap before each event of the stream"]


def test_a_server_that_is_not_there_is_said_in_words(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page("overview")
    monkeypatch.setenv("CONSOLE_SERVER", "http://127.0.0.1:9")
    for name in PAGE_NAMES:
        page = open_page_at(page, name)
        assert not page.exception
        assert any("cannot be reached" in str(error.value) for error in page.error), name


def open_page_at(page: AppTest, name: str) -> AppTest:
    return page.switch_page(f"views/{name}.py").run()


def _planned(page: AppTest, path: str, value: str) -> None:
    next(box for box in page.text_input if str(box.key).endswith(f"_{path}")).set_value(value)
    _plan(page)


def _plan(page: AppTest) -> None:
    next(button for button in page.button if button.label == "Plan this change").click().run()


def _figures(page: AppTest) -> list[dict]:
    return [json.loads(element.proto.spec) for element in page.get("plotly_chart")]


def _rungs(admin: AdminClient) -> list[RungRow]:
    return cast(BucketsPage, admin.page("buckets")).rungs


def _ask(server: OperatedServer, num_tokens: int) -> None:
    body = {"model": "live", "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    assert httpx.post(f"{server.base_url}/completions", json=body, timeout=60).status_code == 200
