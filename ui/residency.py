"""Experts that sleep: the section of the Experts page; nothing where all experts are resident."""

import streamlit as st

from control_plane.console_schemas import ExpertsPage, Span
from ui.charts import lines
from ui.frame import figures, look, plot, plots
from ui.residency_plots import layer_hits, resident_heat
from ui.units import DASH, count, num_bytes, percent

HITS = {"resident_share": "resident"}
FETCHES = {"late_fetches": "late", "prefetches_used": "ahead", "prefetches_unused": "in vain"}
CHANGES = {"residency_changes": ""}


def show_residency(page: ExpertsPage, span: Span) -> None:
    found = page.residency
    if not found.available:
        return
    st.subheader("Experts that sleep", anchor=False)
    num_layers = len(found.layers)
    num_changes = sum(found.changes.get(reason, 0) for reason in ("woke", "evicted", "slept"))
    figures(
        (
            "Resident, of a layer",
            f"{found.num_slots} of {found.num_experts}",
            f"experts have a slot on the device; {found.num_resident} of {found.num_slots * num_layers} slots are taken",
        ),
        (
            "Hit share now",
            percent(found.hit_share_now),
            f"rows whose expert was resident, last minute; in the span {percent(found.hit_share)}",
        ),
        (
            "Late fetches a step",
            _a_step(found.late_fetches_step_now),
            f"copies that a layer waited for, last minute; in the span {_a_step(found.late_fetches_step)}",
        ),
        (
            "Prefetch hits a step",
            _a_step(found.prefetches_used_step),
            f"in the span: fetched a layer ahead and used; {_a_step(found.prefetches_unused_step)} in vain",
        ),
        (
            "Changes",
            count(num_changes),
            "in the span: {} woke, {} evicted for another, {} slept".format(
                *(count(found.changes.get(reason)) for reason in ("woke", "evicted", "slept"))
            ),
        ),
        (
            "Memory, device",
            num_bytes(found.device_bytes),
            f"all slots; all experts are in the host's {num_bytes(found.host_bytes)}",
        ),
    )
    looked = look(span)
    plot(resident_heat(page, looked.mode), "resident")
    plots(
        2,
        layer_hits=layer_hits(found, looked.mode),
        hits=lines(page, looked, "Rows whose expert was resident", "%", HITS, least_top=100, top=105),
        fetches=lines(page, looked, "Experts fetched in a step", "a step", FETCHES, least_top=1),
        changes=lines(page, looked, "Changes of residency", "1/s", CHANGES, least_top=1),
    )


def _a_step(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
