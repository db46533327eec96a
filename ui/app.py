"""The console's entry: navigation, connection, key and refresh at the left; the chosen page beside it.

Started by `python -m ui` (make console), which sets what Streamlit must and must not do.
"""

import streamlit as st

from ui import session
from ui.feed import State
from ui.frame import PAGE_NAMES, live, why_not
from ui.units import age

SECTIONS = {
    "See": ("overview", "buckets", "experts", "kv", "scaling", "economics"),
    "Act": ("diagnosis", "tuning", "audit", "playground"),
}
ICONS = {
    "overview": ":material/monitor_heart:",
    "buckets": ":material/stairs:",
    "experts": ":material/grid_on:",
    "kv": ":material/memory:",
    "scaling": ":material/open_in_full:",
    "economics": ":material/payments:",
    "diagnosis": ":material/stethoscope:",
    "tuning": ":material/tune:",
    "audit": ":material/fact_check:",
    "playground": ":material/play_circle:",
}
# Streamlit's own spacing is made for articles; a person on call wants to see without scrolling.
DENSE = """<style>
.stMainBlockContainer {padding: 2.2rem 2rem 2rem 2rem;}
.stMainBlockContainer h1 {font-size: 1.8rem; padding: 0.2rem 0;}
.stMainBlockContainer h3 {font-size: 1.15rem; padding: 0.4rem 0 0 0;}
.tiles {display: grid; grid-template-columns: repeat(auto-fit, minmax(8.4rem, 1fr)); gap: 0.6rem;}
.tile {border: 1px solid rgba(128, 132, 149, 0.35); border-radius: 0.5rem; padding: 0.5rem 0.8rem;}
.tile .label {font-size: 0.85rem; opacity: 0.8;}
.tile .value {font-size: 1.5rem; line-height: 1.3; white-space: nowrap;}
.tile .more {font-size: 0.75rem; line-height: 1.25; opacity: 0.7;}
.tile.bad {border-color: #C4401C; border-left-width: 5px;}
.tile.bad .value::after {content: " !"; color: #C4401C;}
[data-testid="stSidebarHeader"] {height: 1.5rem; padding: 0.5rem; margin: 0;}
[data-testid="stAlertContainer"] {padding: 0.6rem 0.8rem; min-height: 0;}
.st-key-fields [data-testid="stVerticalBlock"] {gap: 0.35rem;}
</style>"""


def main() -> None:
    st.set_page_config(page_title="moe-ladder console", page_icon="🪜", layout="wide")
    st.html(DENSE)
    pages = {
        heading: [
            st.Page(
                f"views/{name}.py",
                title=PAGE_NAMES[name],
                icon=ICONS[name],
                url_path=name,
                default=name == "overview",
            )
            for name in names
        ]
        for heading, names in SECTIONS.items()
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
    role = session.role()
    label = f"{role.capitalize() or 'No access'} · {'key set' if session.key() else 'no key'}"
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
