"""Plots of experts over devices: who computes how much, before and after moves, and which experts have copies. Pure."""

import plotly.graph_objects as go

from control_plane.expert_schemas import Placement
from ui.charts import add_nothing
from ui.palette import HEAT, HEIGHT, Mode, finished, nice_top, palette

LOAD_TOP = 2.0  # the heat map's end: a device with twice its even share of a layer


def device_bars(placement: Placement, mode: Mode) -> go.Figure:
    """Each device's rows over the mean of the devices, all layers together, before and since the last moves."""
    colours, figure = palette(mode), go.Figure()
    names = [f"device {device}" for device in range(placement.num_devices)]
    is_moved = placement.plan_age_s is not None
    before, after = placement.device_loads_before, placement.device_loads_after
    bars = [
        ("before the last moves", before, colours.second, "/"),
        ("since then" if is_moved else "the last two minutes", after, colours.main, ""),
    ]
    for label, values, colour, shape in bars:
        if values:
            figure.add_bar(
                x=names, y=values, name=label, marker={"color": colour, "pattern": {"shape": shape}},
                text=[f"{value:.2f}" for value in values], textposition="outside", cliponaxis=False,
                hovertemplate="%{y:.3f} x mean",
            )  # fmt: skip
    figure.add_hline(y=1.0, line={"color": colours.good, "dash": "dash", "width": 1.5}, layer="below")
    if not before and not after:
        add_nothing(figure, mode, "nothing was computed in the last two minutes")
    return finished(
        figure, mode, title="Rows by device (1 = even share)", y_title="x mean", height=HEIGHT + 20,
        x={"range": [-0.5, placement.num_devices - 0.5], "categoryorder": "array", "categoryarray": names},
        y={"range": [0, nice_top([*before, *after], 2)]}, barmode="group", bargap=0.3,
    )  # fmt: skip


def device_heat(placement: Placement, mode: Mode) -> go.Figure:
    """Layer x device: rows over the layer's mean in the span; 1 is even, cut at LOAD_TOP."""
    rows = placement.device_rows
    shares = [[value * len(row) / sum(row) if any(row) else None for value in row] for row in rows]
    figure = go.Figure(
        go.Heatmap(
            z=shares, customdata=rows, colorscale=HEAT, zmin=0, zmax=LOAD_TOP, xgap=1, ygap=1,
            colorbar={"title": {"text": "x even"}, "tickvals": [0, 1, 2], "ticktext": ["0", "1", "≥ 2"], "thickness": 14},
            hovertemplate="layer %{y}, device %{x}<br>%{z:.2f} x even, %{customdata:,} rows<extra></extra>",
        )
    )  # fmt: skip
    if not any(map(any, rows)):
        add_nothing(figure, mode, "nothing was computed in this time")
    return _layered(figure, mode, "Rows by layer and device", "device", placement.num_devices, len(rows))


def copies_heat(placement: Placement, mode: Mode) -> go.Figure:
    """Layer x expert: how many slots hold it."""
    copies = placement.copies
    most = max(2, max(map(max, copies), default=2))
    step = max(1, most // 6)
    figure = go.Figure(
        go.Heatmap(
            z=copies, colorscale=HEAT, zmin=1, zmax=most, xgap=1, ygap=1,
            colorbar={"title": {"text": "slots"}, "tickvals": list(range(1, most + 1, step)), "thickness": 14},
            hovertemplate="layer %{y}, expert %{x}: in %{z} slots<extra></extra>",
        )
    )  # fmt: skip
    num_experts = len(copies[0]) if copies else 1
    title = "Slots that hold each expert (more than 1: copies)"
    return _layered(figure, mode, title, "expert", num_experts, len(copies))


def _layered(
    figure: go.Figure, mode: Mode, title: str, across: str, num_across: int, num_layers: int
) -> go.Figure:
    return finished(
        figure, mode, title=title, y_title="layer", legend="none", hovermode="closest",
        height=max(HEIGHT + 20, 140 + 14 * num_layers),
        x={
            "title": {"text": across}, "range": [-0.5, num_across - 0.5], "showgrid": False,
            "dtick": max(1, num_across // 16),
        },
        y={"range": [max(1, num_layers) - 0.5, -0.5], "showgrid": False, "dtick": max(1, num_layers // 12)},
    )  # fmt: skip
