"""Diagnosis: troubles that the server recognises, their evidence, and the change that helps, one click away."""

from typing import Any

import streamlit as st

from control_plane.client import AdminError
from control_plane.console_schemas import DiagnosisPage, FindingRow, Span
from control_plane.merge_patch import leaves
from ui import session
from ui.act import attempt, made_text, may_change, show_plan, show_told, tell, trial
from ui.fields import shown
from ui.frame import live_page, why_not
from ui.maps import words
from ui.plain import plain
from ui.units import seconds

BOXES = {"critical": ":red-badge[critical]", "warning": ":orange-badge[warning]", "info": ":blue-badge[info]"}


def draw(page: DiagnosisPage, span: Span) -> None:
    show_told()
    if page.window_s is None:
        st.info(
            f"Not enough seen yet: the rules look at {seconds(page.min_window_s)} at least.",
            icon=":material/hourglass_top:",
        )
        return
    st.caption(f"Judged from the last {seconds(page.window_s)}.")
    if not page.findings:
        st.success("No trouble is recognised.", icon=":material/check_circle:")
    for finding in page.findings:
        _finding(finding)


def _finding(finding: FindingRow) -> None:
    with st.container(border=True, key=f"finding_{finding.kind}"):
        st.markdown(f"{BOXES[finding.severity]} **{plain(finding.symptom)}**")
        left, right = st.columns([2, 3])
        with left:
            st.caption("Evidence")
            st.table(
                {words(name): _value(value) for name, value in finding.evidence.items()},
                border="horizontal",
                hide_header=True,
            )
        with right:
            st.caption("What helps")
            st.markdown(plain(finding.expected_effect))
            if finding.patch is None:
                st.markdown(f"No change is offered: {plain(finding.why_no_patch)}.")
                return
            for path, value in leaves(finding.patch):
                st.markdown(f"`{path}` → **{plain(shown(value))}**")
            if may_change():
                _act(finding)


def _act(finding: FindingRow) -> None:
    canary = trial(f"fix_{finding.id}")
    apply, dry_run, _ = st.columns([2, 1, 2])
    if apply.button("Apply this fix", type="primary", key=f"apply_{finding.id}"):
        made = attempt(
            lambda: session.client().apply_finding(finding.id, f"diagnosis: {finding.kind}", canary)
        )
        if made is not None:
            tell("success", f"{made_text(made['revision'])} Undo it under Tuning.")
        st.rerun()
    if dry_run.button("Dry run", key=f"plan_{finding.id}"):
        try:
            show_plan(session.client().plan(finding.patch or {}))
        except AdminError as error:
            st.error(why_not(error))


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


live_page("diagnosis", "Diagnosis", draw, has_span=False)
