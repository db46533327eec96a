"""A real server on the embedded model for the console's tests, one a session, and pages run without a browser."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from control_plane.client import AdminClient
from tests.conformance.operated_server import OperatedServer, operated_server
from ui import session
from ui.feed import Feed

ROOT = Path(__file__).parents[2]
APP = ROOT / "ui" / "app.py"
LADDER = {"decode_rows": [1, 4], "prefill_tokens": [64], "max_prefill_tokens": 64, "max_prefill_rows": 4}
EXPERTS = {"resident_experts": 12, "prefetch_experts": 1, "wake_margin": 0.0}  # of 16
ROW_SLOTS = 4
TIMEOUT_S = 120
_ESCAPED = re.compile(r"\\([^\w\s])")  # ui.plain


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    with operated_server(tmp_path_factory.mktemp("console"), ROW_SLOTS, LADDER, EXPERTS) as found:
        yield found


@pytest.fixture
def admin(server: OperatedServer) -> Iterator[AdminClient]:
    with AdminClient(server.root) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_page_is_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page waits for this machine's server; what a slow one looks like, test_feed and test_browser say."""
    monkeypatch.setattr(session, "Feed", partial(Feed, wait_s=TIMEOUT_S / 2))
    session.feed.clear()
    yield
    session.feed.clear()


@pytest.fixture
def open_page(server: OperatedServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AppTest]:
    """Opens a page of the console as a new viewer and returns it drawn."""
    monkeypatch.setenv("CONSOLE_SERVER", server.root)
    session.feed.clear()  # what an earlier test's viewers saw
    for variable in ("CONSOLE_KEY", "CONSOLE_API_KEY"):
        monkeypatch.delenv(variable, raising=False)

    def opened(name: str) -> AppTest:
        app = AppTest.from_file(APP, default_timeout=TIMEOUT_S)
        app.run()
        return app.switch_page(f"views/{name}.py").run() if name != "overview" else app

    return opened


def texts(app: AppTest) -> str:
    """Everything that a page says in words."""
    kinds = (
        app.markdown,
        app.caption,
        app.error,
        app.warning,
        app.info,
        app.success,
        app.title,
        app.subheader,
    )
    return "\n".join(_ESCAPED.sub(r"\1", str(element.value)) for kind in kinds for element in kind)
