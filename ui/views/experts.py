"""Experts: who computes how much, how even it is, which of them sleep, and where experts sit."""

import streamlit as st

from control_plane.console_schemas import ExpertsPage, Span
from ui.charts import lines
from ui.frame import figures, live_page, look, plot, plots
from ui.maps import expert_heat, layer_imbalance
from ui.placement import show_placement
from ui.residency import show_residency
from ui.units import DASH, count, percent, seconds


def draw(page: ExpertsPage, span: Span) -> None:
    if page.num_layers:
        _load(page, span)
    else:
        st.info("No figures yet: they come with the first tokens.", icon=":material/info:")
    show_residency(page, span)
    st.subheader("Where experts sit", anchor=False)
    show_placement(page.placement)


def _load(page: ExpertsPage, span: Span) -> None:
    seen = [value for value in page.imbalance if value is not None]
    worst = max(range(len(page.imbalance)), key=lambda layer: page.imbalance[layer] or 0.0)
    total = page.num_layers * page.num_experts
    figures(
        ("Layers x experts", f"{page.num_layers} x {page.num_experts}", "of the model"),
        (
            "Imbalance, mean",
            f"{sum(seen) / len(seen):.2f}" if seen else DASH,
            "busiest expert over the mean of its layer; 1 is even",
        ),
        ("Worst layer", f"{max(seen):.2f}" if seen else DASH, f"layer {worst}: busiest expert over the mean"),
        (
            "Idle experts",
            f"{page.num_idle} ({percent(page.num_idle / total)})",
            "no token in the window; an idle expert's weights are not read",
        ),
        (
            "Routed",
            count(sum(map(sum, page.tokens))),
            f"tokens times experts each, last {seconds(page.window_s)}",
        ),
    )
    looked = look(span)
    plot(expert_heat(page, looked.mode), "heat")
    imbalance = {"expert_imbalance_max": "worst layer", "expert_imbalance_mean": "mean of layers"}
    plots(
        3,
        layers=layer_imbalance(page, looked.mode),
        imbalance=lines(page, looked, "Imbalance", "x mean", imbalance, least_top=2),
        routed=lines(page, looked, "Routed tokens", "tokens/s", {"routed_tokens": "routed"}, least_top=100),
    )


live_page("experts", "Experts", draw, "Load of every expert in every layer, from the router's own counts.")
