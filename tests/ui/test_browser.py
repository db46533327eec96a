"""The console in a real browser over real servers: Debian's chromium, driven by Playwright.

Waits are for what a person would see, never for a time.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as NotClickable

from control_plane.client import AdminClient
from tests.conformance.operated_server import OperatedServer, operated_server
from tests.patience import until
from tests.ports import free_ports
from tests.ui.conftest import ROOT
from tests.ui.delaying_proxy import DelayingProxy

CHROMIUM = shutil.which("chromium")
WINDOW = "batch_processing.dynamic_adjust_window"
PATIENCE_MS = 60_000
SMALL_LADDER = {"decode_rows": [1], "prefill_tokens": [16], "max_prefill_tokens": 16, "max_prefill_rows": 1}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no chromium here: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "make test installs chromium in CI"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def console(server: OperatedServer) -> Iterator[str]:
    """A console of the tests' server."""
    with started_console(server.root) as url:
        yield url


@pytest.fixture(scope="module")
def proxied(server: OperatedServer) -> Iterator[tuple[DelayingProxy, str]]:
    """A proxy that can be made slow or pointed elsewhere, and the console of what is behind it."""
    with DelayingProxy(server.root) as proxy, started_console(proxy.url) as url:
        yield proxy, url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with viewer(browser) as found:
        yield found


@contextmanager
def viewer(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    found = context.new_page()
    try:
        yield found
    finally:
        context.close()


@contextmanager
def started_console(server: str) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "ui", "--server", server, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_up(url))
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_up(console: str) -> bool:
    try:
        return httpx.get(f"{console}/_stcore/health").status_code == 200
    except httpx.HTTPError:
        return False


def set_window(page: Page, value: str, why: str) -> None:
    """Types a new dynamic_adjust_window and asks for the plan, by keyboard alone."""
    box = page.get_by_label(WINDOW, exact=True)
    box.fill(value)
    box.press("Enter")
    expect(page.get_by_text(re.compile(rf"→ {value} · live")).first).to_be_visible()
    reason = page.get_by_label("Why", exact=True).first
    reason.fill(why)
    reason.press("Enter")


def confirm(page: Page, button: str, yes: str) -> None:
    page.get_by_role("button", name=button).click()
    page.get_by_role("dialog").get_by_role("button", name=yes).click()


def window_in_force(admin: AdminClient) -> str:
    return admin.config()["effective"]["batch_processing"]["dynamic_adjust_window"]


def test_a_threshold_is_changed_and_rolled_back(page: Page, console: str, admin: AdminClient) -> None:
    """The engine obeys: the server's own effective configuration, and its controller's decisions."""
    before = window_in_force(admin)
    page.goto(f"{console}/tuning")
    set_window(page, "1.2s", "from a browser")
    assert window_in_force(admin) == before, "a plan changes nothing"
    confirm(page, "Apply …", "Yes, apply")
    expect(page.get_by_text("It is in force.")).to_be_visible()
    assert window_in_force(admin) == "1.2s"
    assert admin.history()["data"][0]["reason"] == "from a browser"
    start = _newest(admin)
    until(lambda: len(_ticks(admin, start)) >= 4)
    times = _ticks(admin, start)
    gaps = [b - a for a, b in pairwise(times)]
    assert 1.1 < sorted(gaps)[len(gaps) // 2] < 10, "the controller decides every 1.2 s"
    confirm(page, "Undo revision", "Yes, roll back")
    expect(page.get_by_text(re.compile(rf"{WINDOW} 1.2s → {before}"))).to_be_visible()
    assert window_in_force(admin) == before


def test_two_operators_at_once(browser: Browser, console: str, admin: AdminClient) -> None:
    """The second to confirm is refused (412), sees three ways, and goes on without taking back the first one's change."""
    before = admin.config()["revision"]
    with viewer(browser) as first, viewer(browser) as second:
        for page in (first, second):
            page.goto(f"{console}/tuning")
        set_window(first, "320ms", "first")
        set_window(second, "330ms", "second")
        second.get_by_role("button", name="Apply …").click()
        expect(second.get_by_role("dialog")).to_be_visible()
        confirm(first, "Apply …", "Yes, apply")
        expect(first.get_by_text("It is in force.")).to_be_visible()
        second.get_by_role("dialog").get_by_role("button", name="Yes, apply").click()
        expect(second.get_by_text("Somebody else changed it since")).to_be_visible()
        assert window_in_force(admin) == "320ms"
        second.get_by_text("yours: 330ms").click()
        second.get_by_role("button", name=re.compile("Go on with revision")).click()
        confirm(second, "Apply …", "Yes, apply")
        expect(second.get_by_text("It is in force.")).to_be_visible()
        assert window_in_force(admin) == "330ms"
    admin.rollback(before, revision=admin.config()["revision"])


def test_a_diagnosis_is_applied_with_one_click(
    page: Page, console: str, server: OperatedServer, admin: AdminClient
) -> None:
    """Two streams in a rung of four rows waste half of it: recognised, mended by a rung of two with one click."""
    before = admin.config()["revision"]
    with pressure(server):
        until(lambda: any(f.patch for f in admin.page("diagnosis").findings))  # type: ignore[attr-defined]

        def is_applied() -> bool:
            """A finding may be gone between the look and the click: then once more."""
            page.goto(f"{console}/diagnosis")
            try:
                page.get_by_role("button", name="Apply this fix").first.click(timeout=15_000)
                expect(page.get_by_text(re.compile(r"Revision \d+: "))).to_be_visible(timeout=15_000)
            except (AssertionError, NotClickable):
                return False
            return True

        until(is_applied)
    newest = admin.history()["data"][0]
    assert newest["number"] > before
    assert newest["reason"].startswith("diagnosis: ")
    until(lambda: admin.history()["data"][0]["status"] != "compiling")
    admin.rollback(before, revision=admin.config()["revision"])


def test_a_slow_server_does_not_hold_the_page(page: Page, proxied: tuple[DelayingProxy, str]) -> None:
    proxy, console = proxied
    page.goto(console)
    page.get_by_text("2 s", exact=True).click()
    expect(page.get_by_text("Promises kept").first).to_be_visible()
    proxy.delay_s = 3.0
    expect(page.get_by_text("The server takes long to answer.").first).to_be_visible()
    expect(page.get_by_text("Promises kept").first).to_be_visible()
    proxy.delay_s = 0.0
    expect(page.get_by_text("The server takes long to answer.")).to_have_count(0)


def test_a_server_is_killed_and_comes_back(
    page: Page, proxied: tuple[DelayingProxy, str], server: OperatedServer, tmp_path: Path
) -> None:
    """The last good answer stays with its age; when a server is there again the page goes on by itself."""
    proxy, console = proxied
    with operated_server(tmp_path, 1, SMALL_LADDER) as doomed:
        proxy.target = doomed.root
        page.goto(console)
        page.get_by_text("2 s", exact=True).click()
        expect(page.get_by_text("Promises kept").first).to_be_visible()
        doomed.process.kill()
        expect(page.get_by_text(re.compile(r"What you see is \d+ s old"))).to_be_visible()
        expect(page.get_by_text("Not connected")).to_be_visible()
        expect(page.get_by_text("Promises kept").first).to_be_visible()
        opacity = page.locator(".st-key-panel").evaluate("e => getComputedStyle(e).opacity")
        assert float(opacity) < 1, "what is old is greyed"
        proxy.target = server.root
        expect(page.get_by_text("What you see is")).to_have_count(0)
        expect(page.get_by_text("Connected", exact=True)).to_be_visible()


def _newest(admin: AdminClient) -> int:
    """The number of the last decision; the server answers with the oldest first, a thousand at a time."""
    number = 0
    while page := admin.decisions(number, 1000):
        number = page[-1]["number"]
    return number


def _ticks(admin: AdminClient, after: int) -> list[float]:
    return [d["time_s"] for d in admin.decisions(after, 1000) if d["controller"] == "batch_size"]


@contextmanager
def pressure(server: OperatedServer) -> Iterator[None]:
    """Two streams at any time until the block ends: a rung of four rows pads half of its positions."""
    stopped = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not stopped.is_set():
                body = {"model": "live", "prompt": "Once upon", "max_tokens": 300, "ignore_eos": True}
                client.post(f"{server.base_url}/completions", json=body)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(30)
