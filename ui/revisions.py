"""The history of the configuration with a way back to any of it, and the trial that runs."""

from typing import Any

import streamlit as st

from control_plane.client import AdminError
from ui import session
from ui.act import MAX_REASON_CHARS, METRICS, ask, asked, attempt, close_dialog, made_text, may_change, tell
from ui.fields import shown
from ui.frame import require, table, why_not
from ui.plain import plain
from ui.units import clock, seconds


def history(current: int) -> None:
    """The last revisions, newest first, and the buttons that take back."""
    st.subheader("History", anchor=False)
    answer = require(session.history())
    if answer is None:
        return
    found: list[dict[str, Any]] = answer["data"]
    if len(found) > 1 and may_change():
        newest, before = found[0], found[1]
        left, middle, right = st.columns([2, 2, 3], vertical_alignment="bottom")
        left.button(
            f"Undo revision {newest['number']}",
            key="undo",
            icon=":material/undo:",
            on_click=ask,
            args=("rollback", before),
        )
        numbers = {revision["number"]: revision for revision in found[1:]}
        chosen = middle.selectbox(
            "Or go back to", list(numbers), key="back_to", format_func="revision {}".format
        )
        right.button(
            "Roll back …",
            key="rollback",
            disabled=chosen is None,
            on_click=ask,
            args=("rollback", numbers.get(chosen)),
        )
        is_open, revision = asked("rollback")
        if is_open:
            confirm_rollback(revision, current)
    table([_row(revision) for revision in found], "history", "No change yet.")


@st.dialog("Roll back?", on_dismiss=close_dialog)
def confirm_rollback(revision: dict[str, Any], current: int) -> None:
    """A rollback is a new revision; nothing is lost."""
    st.markdown(
        f"The configuration becomes what it was in revision **{revision['number']}** "
        f"({clock(revision['time_s'], session.zone())}, {plain(revision['actor'])}). Later changes are taken back by a new "
        "revision; the history keeps them."
    )
    reason = st.text_input("Why", key="why_back", max_chars=MAX_REASON_CHARS)
    if st.button("Yes, roll back", type="primary", key="confirm_back"):
        close_dialog()
        made = attempt(lambda: session.client().rollback(revision["number"], revision=current, reason=reason))
        if made is not None:
            tell("success", made_text(made))
        st.rerun()


def running_trial() -> None:
    """The change on trial, if there is one: what was, what is, what is left, and the two ways to end it."""
    answer = session.canary()
    trial = answer.data
    if trial is None:
        return
    spec, before, since = trial["spec"], trial["before"], trial["since"]
    left_s = trial["left_s"]
    worse = trial["worse_percent"]
    with st.container(border=True):
        st.markdown(
            f"**Revision {trial['revision']} is on trial** · {METRICS.get(spec['metric'], spec['metric'])}: before "
            f"{_value(spec['metric'], before['value'])}, since {_value(spec['metric'], since['value'])} "
            f"({'not known yet' if worse is None else f'{worse:+.1f} % worse'}, allowed {spec['max_worse_percent']:g} %) · "
            f"{since['num_seen']} of {spec['min_requests']} observations · "
            + (f"{seconds(left_s)} left" if left_s is not None else "waiting for its rungs")
        )
        st.caption(plain(trial["state"]))
        if not may_change():
            return
        accept, revert, _ = st.columns([1, 1, 3])
        if accept.button("Keep it", key="accept"):
            _end(lambda: session.client().accept_canary("kept by hand"), "The change is kept.")
        if revert.button("Take it back", key="revert"):
            _end(lambda: session.client().revert_canary("taken back by hand"), "The change is taken back.")


def _end(call: Any, text: str) -> None:
    try:
        call()
        tell("success", text)
    except AdminError as error:
        tell("error", why_not(error))
    session.renew()
    st.rerun()


def _value(metric: str, value: float | None) -> str:
    if metric == "throughput":
        return "not seen" if value is None else f"{value:,.0f} tokens/s"
    return "not seen" if value is None else seconds(value)


def _row(revision: dict[str, Any]) -> dict[str, str]:
    changes = ", ".join(f"{c['path']}: {shown(c['old'])} → {shown(c['new'])}" for c in revision["changes"])
    back = f"back to {revision['rolled_back_to']}" if revision.get("rolled_back_to") else ""
    return {
        "revision": str(revision["number"]),
        "when": clock(revision["time_s"], session.zone()),
        "who": revision["actor"],
        "status": revision["status"],
        "why": revision["reason"],
        "changes": f"{back}: {changes}" if back and changes else changes or back,
        "error": revision["error"],
    }
