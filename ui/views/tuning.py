"""Tuning: change the configuration while it serves: plan, confirm, try, take back; and the way on when two change at once."""

import time
from typing import Any

import streamlit as st

from control_plane.client import AdminError
from control_plane.merge_patch import leaves
from ui import session
from ui.act import (
    MAX_REASON_CHARS,
    ask,
    asked,
    attempt,
    close_dialog,
    made_text,
    may_change,
    show_plan,
    show_told,
    tell,
    trial,
)
from ui.draft import Choice, Draft
from ui.field_form import Known, field_form
from ui.fields import about, fields_of, shown
from ui.frame import live, require, table, why_not
from ui.plain import plain
from ui.revisions import history, running_trial

ALL = "every section"


def page() -> None:
    st.title("Tuning", anchor=False)
    show_told()
    config, schema = require(session.config()), require(session.schema())
    if config is None or schema is None:
        return
    live(lambda: _standing(config["revision"]))
    live(running_trial)
    draft = _draft(config)
    left, right = st.columns([5, 3], gap="medium")
    with left:
        changed = _fields(config, schema, draft)
        if changed is not None:
            st.session_state["draft"] = changed
            st.rerun()
    with right:
        if draft.is_empty:
            _how()
        elif draft.revision != config["revision"]:
            _conflict(draft, config)
        else:
            _review(draft)
    st.divider()
    history(config["revision"])


def _standing(shown_revision: int) -> None:
    """Which revision is in force, renewed by itself; the rest of the page stays as it is while somebody types."""
    config = require(session.config())
    if config is None:
        return
    pending = config["pending_restart"]
    st.markdown(
        f"Revision **{config['revision']}** · {config['status']}"
        + (f" · waiting for a restart: {', '.join(f'`{path}`' for path in pending)}" if pending else "")
        + ("" if config["survives_restart"] else " · changes are lost at a restart (no state folder)")
    )
    if config.get("problem"):
        st.error(plain(config["problem"]), icon=":material/warning:")
    if config["revision"] != shown_revision:
        st.warning(
            f"Revision {config['revision']} was made since this page was drawn.", icon=":material/group:"
        )
        if st.button("Show it", key="reload"):
            st.rerun()


def _draft(config: dict[str, Any]) -> Draft:
    """What the operator has begun; a new one on the current revision when nothing has."""
    draft: Draft | None = st.session_state.get("draft")
    if draft is None or (draft.is_empty and draft.revision != config["revision"]):
        draft = Draft.on(config["revision"], config["stored"])
        st.session_state["draft"] = draft
    return draft


def _fields(config: dict[str, Any], schema: dict[str, Any], draft: Draft) -> Draft | None:
    fields = fields_of(schema)
    sections = list(dict.fromkeys(field.section for field in fields))
    start = sections.index("batch_processing") if "batch_processing" in sections else 0
    left, right = st.columns(2)
    section = left.selectbox("Section", [*sections, ALL], start, key="section")
    wanted = right.text_input("Find", key="find", placeholder="part of a name or description", max_chars=100)
    needle = wanted.strip().lower()
    chosen = [
        field
        for field in fields
        if (needle or section in (ALL, field.section))
        and needle in f"{field.path} {field.description}".lower()
    ]
    if not needle and section != ALL:
        st.caption(about(schema, section))
    if not chosen:
        st.info(f"No field has “{plain(wanted)}” in its name or description.")
        return None
    return field_form(chosen, draft, _known(config), f"{draft.revision}_{section}_{needle}")


def _known(config: dict[str, Any]) -> Known:
    found = session.history().data or {"data": []}
    last: dict[str, tuple[dict[str, Any], float]] = {}
    for revision in found["data"]:
        for change in revision["changes"]:
            last.setdefault(change["path"], (revision, time.time() - revision["time_s"]))
    effective, stored, defaults = (dict(leaves(config[name])) for name in ("effective", "stored", "defaults"))
    return Known(effective, stored, defaults, last)


def _how() -> None:
    with st.container(border=True):
        st.subheader("Your change", anchor=False)
        st.markdown(
            "1. Edit fields at the left, then **Plan this change**: a dry run.\n"
            "2. See what it would do: fields, rungs, seconds, memory.\n"
            "3. **Apply** it, or try it first with a guard metric.\n"
            "4. Undo it below with one click."
        )


def _review(draft: Draft) -> None:
    with st.container(border=True):
        st.subheader("Your change", anchor=False)
        try:
            plan = session.client().plan(draft.patch)
        except AdminError as error:
            st.error(f"It cannot be done: {plain(error.message)}" if error.status == 422 else why_not(error))
            _give_up(draft)
            return
        if plan["revision"] != draft.revision:  # somebody was quicker than the page
            session.renew("config")
            st.rerun()
        show_plan(plan)
        if not may_change():
            _give_up(draft)
            return
        reason = st.text_input(
            "Why", key="why", max_chars=MAX_REASON_CHARS, placeholder="for the history and the audit"
        )
        canary = trial("tuning")
        st.button(
            "Apply …", type="primary", disabled=not plan["fields"], key="apply", on_click=ask, args=("apply",)
        )
        if asked("apply")[0]:
            _confirm(draft, plan, reason, canary)
        _give_up(draft)


@st.dialog("Apply this change?", on_dismiss=close_dialog)
def _confirm(draft: Draft, plan: dict[str, Any], reason: str, canary: dict[str, Any] | None) -> None:
    show_plan(plan)
    if canary is not None:
        st.markdown(f"On trial for {canary['guard_period']}, guarded by {canary['metric']}.")
    st.caption(
        f"To {session.server()}, for revision {draft.revision}. Reason: {plain(reason or 'none given')}"
    )
    if st.button("Yes, apply", type="primary", key="confirm"):
        close_dialog()
        made = attempt(
            lambda: session.client().change(
                draft.patch, revision=draft.revision, reason=reason, canary=canary
            )
        )
        if made is not None:
            tell("success", made_text(made))
            st.session_state.pop("draft", None)
        st.rerun()


def _give_up(draft: Draft) -> None:
    if st.button("Discard", key="discard"):
        st.session_state.pop("draft", None)
        st.rerun()
    st.caption("Fields in your change: " + ", ".join(f"`{path}`" for path in draft.paths))


def _conflict(draft: Draft, config: dict[str, Any]) -> None:
    """Three ways: what the draft was written on, what somebody else made of it, what the draft says."""
    close_dialog()
    defaults = dict(leaves(config["defaults"]))
    with st.container(border=True, key="conflict"):
        st.subheader("Somebody else changed it since", anchor=False)
        st.markdown(
            f"You began with revision {draft.revision}; now it is **{config['revision']}**. Nothing of yours is in force."
        )
        found = draft.compare(config["stored"], defaults)
        table(
            [
                {
                    "field": field.path,
                    f"base ({draft.revision})": shown(field.base),
                    f"theirs ({config['revision']})": shown(field.theirs),
                    "yours": shown(field.yours),
                }
                for field in found
            ],
            "three_way",
            "",
        )
        choices: dict[str, Choice] = {}
        for field in found:
            if field.is_conflict and field.path in draft.paths:
                words = {
                    Choice.THEIRS: f"theirs: {shown(field.theirs)}",
                    Choice.YOURS: f"yours: {shown(field.yours)}",
                }
                choices[field.path] = st.radio(
                    f"`{field.path}`", list(words), format_func=words.__getitem__, key=f"choice_{field.path}"
                )
        if st.button(f"Go on with revision {config['revision']}", type="primary", key="rebase"):
            st.session_state["draft"] = draft.rebased(config["revision"], config["stored"], choices)
            st.rerun()
        _give_up(draft)


page()
