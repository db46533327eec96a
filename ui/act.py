"""What every change has in common: it is tried once, and what came of it is told in words, also after the page is redrawn."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from control_plane.client import AdminError
from ui import session
from ui.fields import shown
from ui.frame import why_not
from ui.plain import plain
from ui.units import num_bytes, seconds

MAX_REASON_CHARS = 500
METRICS = {
    "itl_p99": "time between tokens, p99",
    "ttft_p99": "time to first token, p99",
    "e2e_p99": "whole request, p99",
    "queue_p99": "time in the queue, p99",
    "throughput": "tokens a second (under full load only)",
}


def attempt(change: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What the server answered, or None after telling why not. Everything is asked for anew afterwards."""
    try:
        return change()
    except AdminError as error:
        if error.is_stale:
            tell("warning", "Somebody else changed the configuration since. Nothing was changed by you.")
        elif error.status in (401, 403):
            tell("error", f"Nothing was changed: {why_not(error)}")
        elif error.status == 0:
            tell(
                "error",
                f"{why_not(error)} It is not known whether the change was made: look at the history before you try again.",
            )
        else:
            tell("error", f"Nothing was changed: {plain(error.message)}")
        return None
    finally:
        session.renew()


def ask(question: str | None, about: Any = None) -> None:
    """Opens the dialog that asks `question`, from the next redraw until it is answered; None closes it."""
    st.session_state["asked"] = None if question is None else (question, about)


def asked(question: str) -> tuple[bool, Any]:
    """Whether the dialog is open, and about what."""
    found = st.session_state.get("asked")
    return (True, found[1]) if found and found[0] == question else (False, None)


def close_dialog() -> None:
    ask(None)


def tell(kind: str, text: str) -> None:
    """Kept until `show_told` shows it, in this redraw or the next."""
    st.session_state["told"] = (kind, text)


def show_told() -> None:
    kind, text = st.session_state.pop("told", (None, ""))
    if kind is not None:
        {"success": st.success, "warning": st.warning, "error": st.error}[kind](text)


def made_text(revision: dict[str, Any]) -> str:
    """What a new revision is, in one line."""
    number, status = revision["number"], revision["status"]
    changes = ", ".join(
        f"`{c['path']}` {plain(shown(c['old']))} → {plain(shown(c['new']))}"
        for c in revision.get("changes", ())
    )
    after = {
        "applied": "It is in force.",
        "compiling": "Its rungs are being compiled; the old ladder serves meanwhile.",
        "canary": "It is on trial, and is taken back by itself if the metric gets worse.",
    }
    return f"Revision {number}: {changes or 'no field differs'}. {after.get(status, f'Status: {status}.')}"


def show_plan(plan: dict[str, Any]) -> None:
    """What a change would do: fields, rungs, seconds, memory, warnings."""
    for change in plan["fields"]:
        st.markdown(
            f"`{change['path']}`: {plain(shown(change['old']))} → **{plain(shown(change['new']))}** · {change['kind']}"
        )
    if not plan["fields"]:
        st.caption("Nothing would change.")
    if plan["rungs_to_add"] or plan["rungs_to_drop"]:
        st.markdown(
            f"Rungs to add: **{', '.join(plan['rungs_to_add']) or 'none'}** · to drop: "
            f"**{', '.join(plan['rungs_to_drop']) or 'none'}**"
        )
        st.markdown(
            f"About **{seconds(plan['compile_s'])}** to compile, **{num_bytes(plan['temp_bytes'])}** of scratch "
            "memory. The old ladder serves meanwhile."
        )
    elif plan["fields"]:
        st.caption("No rung is compiled or dropped; no memory is needed.")
    for warning in plan["warnings"]:
        st.warning(plain(warning))


def trial(key: str) -> dict[str, Any] | None:
    """Widgets of a trial; its body for the API, or None when the change is to hold at once."""
    if not st.toggle(
        "Try it first (canary)", key=f"{key}_on", help="Taken back by itself when the metric gets worse"
    ):
        return None
    left, right = st.columns(2)
    metric = left.selectbox("Guard", list(METRICS), format_func=METRICS.__getitem__, key=f"{key}_metric")
    period = right.text_input("Guard period", "60s", key=f"{key}_period", max_chars=20)
    worse = left.number_input("Worse by at most, %", 0.1, 1000.0, 20.0, key=f"{key}_worse")
    least = right.number_input("Least observations", 1, 1_000_000, 30, key=f"{key}_least")
    return {
        "guard_period": period.strip(),
        "metric": metric,
        "max_worse_percent": worse,
        "min_requests": least,
    }


def may_change() -> bool:
    """False, with a word, where the key is known to be a viewer's."""
    if session.role() == "viewer":
        st.info("This key may look and plan, not change.", icon=":material/lock:")
        return False
    return True
