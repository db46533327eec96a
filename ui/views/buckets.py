"""Buckets: every rung, what it did and cost, what was moved and why, and the ladder that the demand asks for."""

from typing import Any

import streamlit as st

from control_plane.client import AdminError
from control_plane.console_schemas import BucketsPage, RungRow, Span
from ui import session
from ui.charts import gauge_band, lines, stacked
from ui.fields import shown
from ui.frame import figures, live_page, look, mode, plot, plots, require, table, why_not
from ui.maps import demand, inputs_text, moves, number, rung_work, words
from ui.plain import plain
from ui.units import clock, count, num_bytes, percent, seconds

STATES = {"ready": "✔ ready", "compiling": "… compiling", "absent": "- absent", "failed": "✖ failed"}


def draw(page: BucketsPage, span: Span) -> None:
    ladder = page.ladder
    if ladder is not None:
        _ladder(page)
        if ladder.state == "compiling":
            added, dropped = ", ".join(ladder.rungs_to_add), ", ".join(ladder.rungs_to_drop)
            st.info(
                f"The ladder changes: compiling {added or 'nothing'}, then dropping {dropped or 'nothing'}. "
                f"The old ladder serves meanwhile ({seconds(ladder.seconds)} so far).",
                icon=":material/hourglass_top:",
            )
        elif ladder.state == "failed":
            st.error(
                f"The last change of the ladder failed: {plain(ladder.error)}. The old ladder serves.",
                icon=":material/warning:",
            )
    seen = look(span)
    left, right = st.columns([3, 2])
    with left:
        plot(moves(page, seen), "moves")
    with right:
        plot(rung_work(page.rungs, seen.mode), "work")
    plots(
        3,
        batch=gauge_band(page, seen, "Batch size", "requests", "batch_size", least_top=8),
        padding=lines(page, seen, "Padding", "%", {"padding_share": ""}, least_top=10),
        hits=stacked(page, seen, "Launches by rung", "1/s", "rung_hits", least_top=1),
    )
    st.subheader("Rungs", anchor=False)
    table(
        [_rung(rung) for rung in page.rungs],
        "rungs",
        "No ladder yet.",
        max_rows=30,
        column_config=_RUNG_COLUMNS,
    )
    left, right = st.columns([3, 2])
    with left:
        st.subheader("Last moves", anchor=False)
        table(
            [_move(move) for move in page.moves[:50]],
            "last",
            "No number was moved in this time.",
        )
        if page.num_moves > len(page.moves):
            st.caption(
                f"{page.num_moves:,} moves in this time; the newest {len(page.moves)} are drawn, 50 listed."
            )
    with right:
        st.subheader("Reasons since the start", anchor=False)
        rows = [
            {"controller": words(r.controller), "reason": words(r.reason), "decisions": r.num}
            for r in sorted(page.reasons, key=lambda r: -r.num)
        ]
        table(rows, "reasons", "No decision yet.")


def _ladder(page: BucketsPage) -> None:
    ladder, rungs = page.ladder, page.rungs
    assert ladder is not None
    num_ready = sum(rung.state == "ready" for rung in rungs)
    computed = sum(rung.computed_span for rung in rungs)
    padding = sum(rung.padding_span for rung in rungs) / computed if computed else None
    late = next((s.values[-1] for s in page.series if s.name == "late_compiles" and s.values), None)
    figures(
        ("Rungs ready", f"{num_ready} of {len(rungs)}", f"a learned ladder has at most {ladder.max_rungs}"),
        ("Ladder", ladder.state, f"changed {ladder.num_changes} times since the start"),
        ("Launches", count(sum(r.hits_span for r in rungs)), "in the chosen time"),
        ("Padding", percent(padding), "of the computed positions, asked for by nobody, in the chosen time"),
        ("Compile time", seconds(sum(r.compile_s for r in rungs)), "of all rungs together"),
        ("Late compiles", count(late), "compiles after the server was ready: always a fault"),
    )


_RUNG_COLUMNS: dict[str, Any] = {
    "occupancy": st.column_config.ProgressColumn("occupancy", min_value=0, max_value=1, format="percent"),
    "busy": st.column_config.ProgressColumn("busy", min_value=0, max_value=1, format="percent"),
}


def _rung(rung: RungRow) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "state": STATES[rung.state] + (f": {rung.error}" if rung.error else ""),
        "launches": rung.hits_span,
        "occupancy": rung.occupancy_span,
        "padding": rung.padding_span,
        "busy": rung.busy_share_span,
        "step": seconds(rung.step_s),
        "compile": seconds(rung.compile_s) + (" (cache)" if rung.from_cache else ""),
        "memory": num_bytes(rung.temp_bytes),
    }


def _move(move: Any) -> dict[str, str]:
    return {
        "when": clock(move.time, session.zone()),
        "what": words(move.controller),
        "from": number(move.previous),
        "to": number(move.value),
        "why": words(move.reason),
        "numbers": inputs_text(move),
    }


def proposal() -> None:
    """What the ladder learned, and the button that puts it in force: a change like any other, with its dry run."""
    st.subheader("The ladder that the demand asks for", anchor=False)
    answer = require(session.ladder())
    if answer is None:
        return
    sizes = {phase: [r["size"] for r in answer["rungs"] if r["phase"] == phase] for phase in answer["demand"]}
    drawn = {
        f"demand_{phase}": demand(found, f"Demand, {phase}", sizes[phase], mode())
        for phase, found in answer["demand"].items()
    }
    plots(2, **drawn)
    if (applied := answer.get("applied")) is not None:
        _followed(applied)
    found = answer.get("proposal")
    if found is None:
        st.info(
            f"Nothing to propose: {plain(answer.get('why_no_proposal') or 'no reason given')}",
            icon=":material/info:",
        )
        return
    st.markdown(
        f"A learned ladder would spare **{percent(found['predicted_gain'])}** of the computed positions: "
        + ", ".join(
            f"`{path}`: {plain(shown(value))}" for path, value in found["patch"].get("ladder", {}).items()
        )
    )
    for note in found.get("notes", ()):
        st.caption(plain(note))
    with st.form("apply_ladder", border=False):
        reason = st.text_input("Why", placeholder="for the history", max_chars=500)
        if st.form_submit_button("Apply the learned ladder", type="primary"):
            try:
                made = session.client().apply_ladder(reason)
            except AdminError as error:
                st.error(why_not(error))
            else:
                session.renew()
                change = made["plan"]
                st.success(
                    f"Revision {made['revision']['number']}: compiling {len(change['rungs_to_add'])} rungs, about "
                    f"{seconds(change['compile_s'])}. The old ladder serves meanwhile; Tuning takes it back."
                )


def _followed(applied: dict[str, Any]) -> None:
    """What a learned ladder promised and what came of it."""
    realised = applied.get("realised")
    seen = "nothing seen yet" if realised is None else f"seen so far: {realised}"
    st.caption(
        f"Revision {applied['revision']} ({applied['status'] or 'no longer kept'}) put a learned ladder in force: "
        f"predicted gain {percent(applied['predicted_gain'])}, {seen}"
    )


live_page("buckets", "Buckets", draw, "Every shape that is compiled: nothing else ever runs.")
st.divider()
proposal()
