"""What every page looks like: title, state of the data, live panels that renew themselves, and plain words where nothing is.

The last good answer stays on the screen, greyed and with its age, whatever happens to the server.
"""

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, cast

import plotly.graph_objects as go
import streamlit as st

from control_plane.client import AdminError
from control_plane.console_schemas import SPANS, ConsolePage, Page, Span
from control_plane.wire import Part
from ui import session
from ui.charts import Look
from ui.feed import Answer, State
from ui.palette import Mode
from ui.plain import plain
from ui.units import age, clock

STALE_TICKS = 4  # of the server's: data older than this is called old
MIN_STALE_S = 10.0
ROW_HEIGHT = 32  # pixels
PLOT_CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
PAGE_NAMES = {
    "overview": "Overview",
    "buckets": "Buckets",
    "experts": "Experts",
    "kv": "KV levels",
    "scaling": "Scaling",
    "economics": "Economics",
    "diagnosis": "Diagnosis",
    "tuning": "Tuning",
    "audit": "Audit",
    "playground": "Playground",
}
_GREYED = "<style>.st-key-panel {opacity: 0.5; filter: grayscale(0.8);}</style>"
_STATE_ICONS = {
    "ready": ":green-badge[ready]",
    "loading": ":orange-badge[loading]",
    "draining": ":orange-badge[draining]",
    "failed": ":red-badge[failed]",
    "stopped": ":red-badge[stopped]",
}


def live_page(
    name: Page, title: str, draw: Callable[[Any, Span], None], intro: str = "", has_span: bool = True
) -> None:
    """A page that is drawn anew from the server's snapshot as often as the viewer wants. `draw` gets the page's type."""
    left, right = st.columns([5, 2], vertical_alignment="center")
    left.title(title, anchor=False)
    span: Span = st.session_state.get("span", SPANS[0])
    if has_span:
        with right:
            chosen = st.segmented_control(
                "Time span",
                SPANS,
                default=span,
                key=f"span_{name}",
                required=True,
                label_visibility="collapsed",
            )
        span = cast(Span, chosen or span)
        st.session_state["span"] = span
    if intro:
        st.caption(intro)

    def panel() -> None:
        answer = session.page(name, span)
        received: session.Received | None = answer.data
        is_old = tell_state(answer, received)
        if received is None:
            return
        with st.container(key="panel"):
            if is_old:
                st.html(_GREYED)
            draw(received.page, span)

    live(panel)


def live(draw: Callable[[], None]) -> None:
    """A part of a page that renews itself; once only while the viewer has paused."""
    st.fragment(draw, run_every=session.interval_s())()


def tell_state(answer: Answer, received: session.Received | None) -> bool:
    """One line about the data, or what is wrong with it. Returns whether what is shown is old."""
    if received is None:
        _tell_nothing(answer)
        return False
    page: ConsolePage = received.page
    seconds = received.age_s(time.monotonic())
    is_stale = seconds > max(MIN_STALE_S, STALE_TICKS * page.tick_s, 2 * (session.interval_s() or 0.0))
    if answer.state in (State.FAILED, State.SLOW):
        _tell_trouble(answer, seconds)
    elif is_stale and session.interval_s() is None:
        st.info(f"Paused. What you see is **{age(seconds)} old**.", icon=":material/pause:")
    elif is_stale:
        st.warning(
            f"Data is **{age(seconds)} old**: the server answers, but its engine has not moved since.",
            icon=":material/hourglass_top:",
        )
    state = _STATE_ICONS.get(page.state, f":gray-badge[{page.state}]")
    revision = f" · revision {page.version}" if page.version is not None else ""
    st.markdown(
        f"{state} **{plain(page.model or 'no model yet')}**{revision} · data {age(seconds)} old "
        f"· {clock(page.server_time, session.zone())}"
    )
    if page.error:
        st.error(plain(page.error), icon=":material/warning:")
    if page.state == "loading":
        st.info("The model is loading; figures come when it serves.", icon=":material/hourglass_top:")
    return is_stale or answer.state is State.FAILED


def require(answer: Answer) -> Any:
    """The data of an answer for a page without a snapshot: None, and the reason on the screen, when nothing came yet."""
    if answer.data is None:
        _tell_nothing(answer)
    else:
        _tell_trouble(answer, answer.age_s)
    return answer.data


def _tell_trouble(answer: Answer, seconds: float | None) -> None:
    """Why the last good answer still stands, if the server failed to give a newer one or takes long."""
    if answer.state is State.FAILED:
        st.error(
            f"**{why_not(answer.error)}** What you see is **{age(seconds)} old**.{_again()}",
            icon=":material/warning:",
        )
    elif answer.state is State.SLOW:
        st.warning(
            f"The server takes long to answer. What you see is **{age(seconds)} old**.",
            icon=":material/hourglass_top:",
        )


def why_not(error: BaseException | None) -> str:
    """What went wrong, for the person who looks, and what to do."""
    if not isinstance(error, AdminError):
        return f"The console could not ask: {type(error).__name__}."
    if error.status in (401, 403):
        return f"The server refuses: {plain(error.message)} Enter a key at the left under “Key”."
    if error.code == "unreachable":
        return f"The server at {session.server()} cannot be reached."
    if error.code == "timeout":
        return f"The server at {session.server()} did not answer within {session.TIMEOUT_S:.0f} s."
    if error.status == 503:
        return f"The server cannot answer now: {plain(error.message)}"
    return f"The server answered {plain(error.status or error.code)}: {plain(error.message)}"


def link_to(page: str) -> None:
    """A link to another page of the console, in this tab: another tab would not have the key."""
    if page in PAGE_NAMES:
        st.page_link(f"views/{page}.py", label=f"See {PAGE_NAMES[page]}")


def unavailable(part: Part, what: str) -> bool:
    """Says in plain words that a part is not there. Returns whether it is missing."""
    if not part.available:
        st.info(
            f"**{what}** is not available: {plain(part.reason or 'the server gives no reason')}",
            icon=":material/info:",
        )
    return not part.available


def mode() -> Mode:
    return "dark" if st.context.theme.type == "dark" else "light"


def look(span: Span) -> Look:
    return Look(span, session.zone(), mode())


def plot(figure: go.Figure, key: str) -> None:
    """A screen reader says the figure's title."""
    st.plotly_chart(
        figure, key=key, theme=None, config=PLOT_CONFIG, alt=figure.to_dict()["layout"]["title"]["text"]
    )


def plots(columns: int, **drawn: go.Figure) -> None:
    """Plots side by side in rows of `columns`, by their keys."""
    places: list[Any] = []
    for key, figure in drawn.items():
        places = places or list(st.columns(columns))
        with places.pop(0):
            plot(figure, key)


def figures(*cells: tuple[str, str, str], bad: Sequence[str] = ()) -> None:
    """Tiles of label, value, explanation in a row that wraps. bad: labels whose value breaks a promise."""
    tiles = "".join(
        f'<div class="tile{" bad" if label in bad else ""}"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{escape(explanation)}</div></div>'
        for label, value, explanation in cells
    )
    st.html(f'<div class="tiles">{tiles}</div>')


def table(rows: Sequence[dict[str, Any]], key: str, empty: str, max_rows: int = 10, **settings: Any) -> None:
    """Rows as a table, or the sentence `empty`."""
    if not rows:
        st.caption(empty)
        return
    height = ROW_HEIGHT * (min(len(rows), max_rows) + 1) + 3
    st.dataframe(
        rows, key=key, hide_index=True, width="stretch", height=height, row_height=ROW_HEIGHT, **settings
    )


def _tell_nothing(answer: Answer) -> None:
    if answer.state is State.FAILED:
        st.error(f"**{why_not(answer.error)}** Nothing has come yet.{_again()}", icon=":material/warning:")
        return
    st.info(f"Waiting for {session.server()} to answer …", icon=":material/hourglass_top:")
    st.skeleton(height=200)


def _again() -> str:
    every = session.interval_s()
    return f" Trying again every {every:g} s." if every else " Paused: not trying again."
