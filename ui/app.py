"""The console's entry: navigation, connection, key and refresh at the left; the chosen page beside it.

Started by `python -m ui` (make console), which sets what Streamlit must and must not do.
"""

import streamlit as st

from ui import session
from ui.frame import live, why_not
from ui.feed import State
from ui.units import age

PAGES = {
    "See": (
        ("overview", "Overview", ":material/monitor_heart:"),
        ("buckets", "Buckets", ":material/stairs:"),
        ("experts", "Experts", ":material/grid_on:"),
        ("kv", "KV levels", ":material/memory:"),
        ("scaling", "Scaling", ":material/open_in_full:"),
        ("economics", "Economics", ":material/payments:"),
    ),
    "Act": (
        ("diagnosis", "Diagnosis", ":material/stethoscope:"),
        ("tuning", "Tuning", ":material/tune:"),
        ("audit", "Audit", ":material/fact_check:"),
        ("playground", "Playground", ":material/play_circle:"),
    ),
}


def main() -> None:
    st.set_page_config(page_title="moe-ladder console", page_icon="🪜", layout="wide")
    pages = {
        heading: [
            st.Page(f"views/{name}.py", title=title, icon=icon, url_path=name, default=name == "overview")
            for name, title, icon in listed
        ]
        for heading, listed in PAGES.items()
    }
    chosen = st.navigation(pages, expanded=True)
    with st.sidebar:
        live(_connection)
        _refresh()
        _key()
    chosen.run()


def _connection() -> None:
    """Whether the server answers, whatever page is open."""
    answer = session.health()
    place = session.server().removeprefix("http://")
    if answer.state is State.FAILED:
        since = f" Last answer {age(answer.age_s)} ago." if answer.age_s is not None else ""
        st.error(f"**Not connected** · {place}\n\n{why_not(answer.error)}{since}")
    elif answer.data is None:
        st.info(f"**Connecting** · {place}")
    elif answer.state is State.SLOW:
        st.warning(f"**Slow** · {place}\n\nLast answer {age(answer.age_s)} ago.")
    elif answer.data.get("ready"):
        st.success(f"**Connected** · {place}")
    else:
        st.warning(f"**{str(answer.data.get('state', 'not ready')).capitalize()}** · {place}")


def _refresh() -> None:
    st.segmented_control(
        "Look again every", list(session.INTERVALS), default=session.DEFAULT_INTERVAL, key="interval", required=True
    )  # fmt: skip


def _key() -> None:
    """A key is taken over into the session and its field emptied at once; it is shown nowhere."""
    label = "Key: set" if session.key() else "Key: none"
    with st.expander(label, icon=":material/key:"), st.form("key_form", clear_on_submit=True, border=False):
        entered = st.text_input(
            "Operator's or viewer's key", type="password", autocomplete="off", max_chars=session.MAX_KEY_CHARS,
            help="Kept in this console's memory for this browser tab only. Empty forgets it.",
        )  # fmt: skip
        if st.form_submit_button("Use this key"):
            try:
                session.enter_key(entered)
            except ValueError as error:
                st.error(str(error))
            else:
                st.rerun()


main()
