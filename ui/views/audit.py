"""Audit: who changed what, when and why, refused tries too; and whether the chain of lines is whole."""

from typing import Any

import streamlit as st

from control_plane.client import AdminError
from control_plane.console_schemas import AuditPage, Span
from ui import session
from ui.fields import shown
from ui.frame import live_page, table, why_not
from ui.plain import plain

HIDDEN = ("previous", "hash")  # of the chain; the check below looks at them


def draw(page: AuditPage, span: Span) -> None:
    wanted = st.text_input("Find", key="audit_find", placeholder="an actor, a field, a word", max_chars=100)
    needle = wanted.strip().lower()
    entries = [entry for entry in [*page.entries, *_older()] if needle in str(entry).lower()]
    empty = "No line has this word." if needle else "No line yet."
    table([_row(entry) for entry in entries], "audit", empty, max_rows=15)
    left, right, _ = st.columns([1, 1, 2])
    before = page.before if not _older() else st.session_state.get("audit_before")
    if left.button("Older lines", disabled=before is None, key="older"):
        _load_older(before)
    if right.button("Check the chain", key="verify", help="Every line holds the SHA-256 of the line before"):
        _verify()
    st.caption(f"{len(entries)} lines shown. Keys are never written, only the first digits of their digests.")


def _older() -> list[dict[str, Any]]:
    return st.session_state.get("audit_older", [])


def _load_older(before: int | None) -> None:
    try:
        found = session.client().audit(before, 100)
    except AdminError as error:
        st.error(why_not(error))
        return
    st.session_state["audit_older"] = [*_older(), *found["data"]][-1000:]
    st.session_state["audit_before"] = found["before"]
    st.rerun(scope="fragment")


def _verify() -> None:
    try:
        found = session.client().verify_audit()
    except AdminError as error:
        st.error(why_not(error))
        return
    if found["is_ok"]:
        st.success(
            f"The chain is whole: lines {found['first']} to {found['last']}. Head: `{found['head']}`",
            icon=":material/check_circle:",
        )
    else:
        st.error(f"The chain is broken: {plain(found['problem'])}", icon=":material/warning:")


def _row(entry: dict[str, Any]) -> dict[str, str]:
    changes = entry.get("changes") or []
    fields = entry.get("fields") or []
    text = ", ".join(f"{c.get('path')}: {shown(c.get('old'))} → {shown(c.get('new'))}" for c in changes)
    known = {"number", "time", "actor", "event", "result", "reason", "revision", "changes", "fields", *HIDDEN}
    rest = ", ".join(
        f"{name} {value}" for name, value in entry.items() if name not in known and value not in ("", None)
    )
    return {
        "line": str(entry.get("number", "")),
        "when": str(entry.get("time", "")).replace("T", " ").removesuffix("Z"),
        "who": str(entry.get("actor", "")),
        "what": str(entry.get("event", "")),
        "result": str(entry.get("result", "")),
        "revision": str(entry.get("revision", "")),
        "why": str(entry.get("reason", "")),
        "changed": text or ", ".join(map(str, fields)),
        "more": rest,
    }  # fmt: skip


live_page("audit", "Audit", draw, "Times are UTC.", has_span=False)
