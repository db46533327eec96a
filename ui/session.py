"""What a page asks the server for, and as whom: the key, the clients, and the feed that all viewers of this console share.

Keys live in the memory of this process: in a viewer's session, or in the environment. They are never put into a widget's
value, a URL, a log line or an error; answers are shared only between viewers with the same key.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import httpx
import streamlit as st

from control_plane.client import AdminClient, AdminError, Cached
from control_plane.console_schemas import ConsolePage, Page, Span
from ui.feed import Answer, Feed, State

SERVER_VARIABLE, KEY_VARIABLE, API_KEY_VARIABLE = "CONSOLE_SERVER", "CONSOLE_KEY", "CONSOLE_API_KEY"
DEFAULT_SERVER = "http://127.0.0.1:8000"
INTERVALS = {"2 s": 2.0, "5 s": 5.0, "15 s": 15.0, "paused": None}
DEFAULT_INTERVAL = "5 s"
TIMEOUT_S = 10.0
MIN_TTL_S = 1.0  # two viewers whose timers fall together share one question
SCHEMA_TTL_S = 300.0
ROLE_TTL_S = 30.0
MAX_KEY_CHARS = 512


@dataclass(frozen=True, slots=True)
class Received:
    """A page with the time at which its content came first: an unchanged one grows older."""

    cached: Cached[ConsolePage]
    first_s: float

    @property
    def page(self) -> Any:
        return self.cached.page

    def age_s(self, now_s: float) -> float:
        return (self.cached.page.data_age_s or 0.0) + now_s - self.first_s


def server() -> str:
    return os.environ.get(SERVER_VARIABLE, DEFAULT_SERVER).rstrip("/")


def key() -> str:
    """The operator's or viewer's key of this session; "" without one."""
    return st.session_state.get("admin_key") or os.environ.get(KEY_VARIABLE, "")


def api_key() -> str:
    """The key for /v1, where the server asks for one."""
    return st.session_state.get("api_key") or os.environ.get(API_KEY_VARIABLE, "")


def enter_key(entered: str, name: str = "admin_key") -> None:
    """Takes a key over into the session. Raises ValueError without showing it."""
    entered = entered.strip()
    if len(entered) > MAX_KEY_CHARS or not entered.isascii() or not entered.isprintable():
        raise ValueError(f"a key has at most {MAX_KEY_CHARS} plain characters")
    st.session_state[name] = entered


def interval_s() -> float | None:
    """Seconds between two looks; None while paused."""
    return INTERVALS[st.session_state.get("interval") or DEFAULT_INTERVAL]


def zone() -> ZoneInfo | None:
    """The viewer's time zone; None is this machine's."""
    try:
        return ZoneInfo(st.context.timezone or "")
    except (ZoneInfoNotFoundError, ValueError, TypeError):
        return None


def client() -> AdminClient:
    return _client(server(), key())


def page(name: Page, span: Span) -> Answer:
    """The console page as Received."""
    admin = client()
    question = _question("page", name, span)

    def fetch() -> Received:
        before: Received | None = feed().peek(question).data
        cached = admin.cached_page(name, span, before.cached if before else None)
        if before is not None and cached.is_same:
            return before
        return Received(cached, time.monotonic())

    return feed().ask(question, fetch, _ttl_s())


def config() -> Answer:
    return _ask("config", AdminClient.config)


def schema() -> Answer:
    return _ask("schema", AdminClient.config_schema, SCHEMA_TTL_S)


def history() -> Answer:
    return _ask("history", AdminClient.history)


def canary() -> Answer:
    return _ask("canary", AdminClient.canary)


def ladder() -> Answer:
    return _ask("ladder", AdminClient.ladder)


def health() -> Answer:
    """`{"ready": bool, "state": str}`; needs no key, and comes from the server's memory."""
    at = server()

    def fetch() -> dict[str, Any]:
        try:
            found = http().get(f"{at}/health/ready").json()
        except httpx.TimeoutException:
            raise AdminError(0, "timeout", "GET /health/ready took too long") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminError(0, "unreachable", f"GET /health/ready: {type(error).__name__}") from None
        except ValueError:
            raise AdminError(0, "bad_answer", "GET /health/ready did not answer with JSON") from None
        return found if isinstance(found, dict) else {}

    return feed().ask((at, "health"), fetch, _ttl_s())


def role() -> str:
    """`operator`, `viewer`, or "" while the server has not said, or has refused."""
    answer = _ask("whoami", AdminClient.whoami, ROLE_TTL_S)
    return answer.data.role if answer.data is not None and answer.state is not State.FAILED else ""


def renew(*names: str) -> None:
    """After a change: what is asked for next comes from the server."""
    for name in names or ("config", "history", "canary", "ladder"):
        feed().forget(_question(name))


def _ask(name: str, method: Callable[[AdminClient], Any], ttl_s: float = MIN_TTL_S) -> Answer:
    admin = client()
    return feed().ask(_question(name), lambda: method(admin), ttl_s)


def _ttl_s() -> float:
    return max(MIN_TTL_S, 0.9 * (interval_s() or 0.0))


def _question(*parts: str) -> tuple[str, ...]:
    return (server(), hashlib.sha256(key().encode()).hexdigest(), *parts)


@st.cache_resource(show_spinner=False)
def feed() -> Feed:
    return Feed()


@st.cache_resource(show_spinner=False, max_entries=64)
def _client(base_url: str, admin_key: str) -> AdminClient:
    return AdminClient(base_url, admin_key or None, TIMEOUT_S)


@st.cache_resource(show_spinner=False)
def http() -> httpx.Client:
    """For /health and /v1; shared, without a key of its own."""
    return httpx.Client(timeout=TIMEOUT_S)
