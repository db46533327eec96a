"""Keys in the console: without one nothing is shown, a viewer plans, an operator changes, and a key is seen nowhere."""

import hashlib
from collections.abc import Callable, Iterator

import pytest
from streamlit.testing.v1 import AppTest

from tests.control_plane.conftest import Running, make_config, running
from tests.control_plane.fake_engine import FakeEngine
from tests.ui.conftest import APP, TIMEOUT_S, texts
from ui import session

OPERATOR, VIEWER = "operator-key-0123456789", "viewer-key-0123456789"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    def digest(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    config = make_config(admin_keys=[digest(OPERATOR)], viewer_keys=[digest(VIEWER)], state_dir="off")
    with running(FakeEngine(), config) as found:
        yield found


@pytest.fixture
def tuning(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AppTest]:
    """The tuning page after somebody has entered a key."""
    session.feed.clear()
    monkeypatch.setenv("CONSOLE_SERVER", guarded.base_url)
    monkeypatch.delenv("CONSOLE_KEY", raising=False)

    def opened(key: str) -> AppTest:
        page = AppTest.from_file(APP, default_timeout=TIMEOUT_S).run()
        page = page.switch_page("views/tuning.py").run()
        if key:
            enter(page, key)
        return page

    return opened


def enter(page: AppTest, key: str) -> None:
    next(box for box in page.text_input if box.label.startswith("Operator's or viewer's")).set_value(key)
    next(button for button in page.button if button.label == "Use this key").click().run()


def plan(page: AppTest) -> None:
    box = next(b for b in page.text_input if str(b.key).endswith("_batch_processing.dynamic_adjust_window"))
    box.set_value("300ms")
    next(button for button in page.button if button.label == "Plan this change").click().run()


def keys(page: AppTest) -> set[str]:
    return {str(button.key) for button in page.button}


def test_without_a_key_nothing_is_shown_and_the_way_on_is_told(tuning: Callable[[str], AppTest]) -> None:
    page = tuning("")
    assert "Enter a key at the left" in texts(page)
    assert not page.selectbox
    assert "No access · no key" in {expander.label for expander in page.expander}


def test_a_wrong_key_is_told_and_may_be_mended(tuning: Callable[[str], AppTest]) -> None:
    page = tuning("guess")
    assert "The server refuses" in texts(page)
    enter(page, OPERATOR)
    assert "The server refuses" not in texts(page)


def test_a_viewer_plans_and_cannot_apply(tuning: Callable[[str], AppTest]) -> None:
    page = tuning(VIEWER)
    plan(page)
    told = texts(page)
    assert "500ms → **300ms**" in told
    assert "This key may look and plan, not change." in told
    assert not keys(page) & {"apply", "undo", "rollback"}


def test_an_operator_may_apply(tuning: Callable[[str], AppTest]) -> None:
    page = tuning(OPERATOR)
    plan(page)
    assert "apply" in keys(page)


def test_what_an_operator_saw_is_not_shown_to_a_newcomer(tuning: Callable[[str], AppTest]) -> None:
    assert tuning(OPERATOR).selectbox
    assert not tuning("").selectbox


def test_a_key_is_shown_nowhere(
    tuning: Callable[[str], AppTest], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tuning(OPERATOR)
    monkeypatch.setenv("CONSOLE_KEY", VIEWER)
    other = tuning("")
    assert other.selectbox, "the key of the environment is used"
    for key in (OPERATOR, VIEWER):
        for found in (page, other):
            assert key not in str(found.main) + str(found.sidebar) + texts(found)
            assert key not in str(found.query_params)
        printed = capfd.readouterr()
        assert key not in printed.out + printed.err


@pytest.mark.parametrize("entered", ["key\twith a tab", "schlüssel"])
def test_what_cannot_be_a_key_is_refused_without_showing_it(
    tuning: Callable[[str], AppTest], entered: str
) -> None:
    page = tuning(entered)
    assert "a key has at most 512 plain characters" in texts(page)
    assert entered not in texts(page)
