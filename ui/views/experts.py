"""Experts: who computes how much, how even it is, and where experts sit."""

import streamlit as st

from control_plane.console_schemas import ExpertsPage, Placement, Span
from ui import session
from ui.charts import lines
from ui.frame import figures, live_page, mode, plot, plots, unavailable
from ui.maps import expert_heat, layer_imbalance
from ui.units import age, count, percent, seconds


def draw(page: ExpertsPage, span: Span) -> None:
    if not page.num_layers:
        st.info("No figures yet: they come with the first tokens.", icon="ℹ️")  # noqa: RUF001
        return
    seen = [value for value in page.imbalance if value is not None]
    worst = max(range(len(page.imbalance)), key=lambda layer: page.imbalance[layer] or 0.0)
    total = page.num_layers * page.num_experts
    figures(
        ("Layers x experts", f"{page.num_layers} x {page.num_experts}", "of the model"),
        (
            "Imbalance, mean",
            f"{sum(seen) / len(seen):.2f}" if seen else "–",  # noqa: RUF001
            "busiest expert over the mean of its layer; 1 is even",
        ),
        ("Worst layer", f"{max(seen):.2f} (layer {worst})" if seen else "–", "busiest expert over the mean"),  # noqa: RUF001
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
    plot(expert_heat(page, mode()), "heat", "Tokens of each expert in each layer over the layer's mean")
    common = {"span": span, "zone": session.zone(), "mode": mode()}
    plots(
        2,
        (layer_imbalance(page, mode()), "layers", "Busiest expert over the mean by layer"),
        (
            lines(page, [("expert_imbalance_max", "worst layer"), ("expert_imbalance_mean", "mean of layers")], title="Imbalance over time", unit="x mean", least_top=2, **common),
            "imbalance", "Imbalance over time",
        ),
        (
            lines(page, [("routed_tokens", "routed")], title="Routed tokens", unit="tokens/s", least_top=100, **common),
            "routed", "Routed tokens a second over time",
        ),
    )  # fmt: skip
    st.subheader("Where experts sit", anchor=False)
    _placement(page.placement)


def _placement(placement: Placement) -> None:
    if unavailable(placement, "Placement over devices"):
        return
    before, after = placement.imbalance_before, placement.imbalance_after
    figures(
        ("Devices", str(placement.num_devices), "that share the experts"),
        ("Copies", str(placement.num_copies), "beside the first of each expert"),
        (
            "Imbalance before → after",
            f"{before:.2f} → {after:.2f}" if before is not None and after is not None else "–",  # noqa: RUF001
            "busiest device over the mean, around the last rebalance",
        ),
        ("Moves in flight", str(placement.moves_in_flight), "experts whose weights are on their way"),
        ("Plan", f"{age(placement.plan_age_s)} old", "since the placement was planned"),
    )
    if placement.device_tokens:
        st.bar_chart(
            {"tokens": placement.device_tokens}, x_label="device", y_label="tokens", horizontal=False
        )


live_page("experts", "Experts", draw, "Load of every expert in every layer, from the router's own counts.")
