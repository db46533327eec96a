"""Plots of experts that sleep: which are resident, and how often a layer finds its experts there. Pure functions."""

from collections.abc import Sequence

import plotly.graph_objects as go

from control_plane.console_schemas import ExpertsPage
from control_plane.expert_schemas import Residency
from ui.charts import add_nothing
from ui.palette import HEIGHT, Mode, finished, palette
from ui.units import percent

MOST_WORST = 3  # layers that are pointed out, where there are many


def resident_heat(page: ExpertsPage, mode: Mode) -> go.Figure:
    """Layer x expert: resident or asleep now; its rows in the hover text."""
    found, colours = page.residency, palette(mode)
    asleep, resident = colours.grid, colours.main
    words = [["resident" if is_resident else "asleep" for is_resident in row] for row in found.resident]
    figure = go.Figure(
        go.Heatmap(
            z=found.resident, y=found.layers, customdata=_rows_and_words(page, words), zmin=0, zmax=1, xgap=1, ygap=1,
            colorscale=[[0, asleep], [0.5, asleep], [0.5, resident], [1, resident]],
            colorbar={"tickvals": [0.25, 0.75], "ticktext": ["asleep", "resident"], "thickness": 14, "ticklen": 0},
            hovertemplate="layer %{y}, expert %{x}: %{customdata[0]}<br>%{customdata[1]:,} rows in the span<extra></extra>",
        )
    )  # fmt: skip
    num_layers, first = max(1, len(found.layers)), min(found.layers, default=0)
    return finished(
        figure, mode, title="Resident experts now", y_title="layer", legend="none", hovermode="closest",
        height=max(150, 110 + 14 * num_layers),
        x={
            "title": {"text": "expert"}, "range": [-0.5, found.num_experts - 0.5], "showgrid": False,
            "dtick": max(1, found.num_experts // 16),
        },
        y={"range": [max(found.layers, default=0) + 0.5, first - 0.5], "showgrid": False, "dtick": max(1, num_layers // 12)},
    )  # fmt: skip


def layer_hits(found: Residency, mode: Mode) -> go.Figure:
    """Share of rows whose expert was resident, by layer; the worst layers are marked and told in numbers."""
    colours = palette(mode)
    shares = [None if share is None else 100 * share for share in found.layer_hit_shares]
    worst = worst_layers(found.layer_hit_shares)
    is_worst = [index in worst for index in range(len(shares))]
    figure = go.Figure(
        go.Bar(
            x=found.layers, y=shares, marker={"color": [colours.second if w else colours.main for w in is_worst]},
            text=[percent(s) if w else "" for s, w in zip(found.layer_hit_shares, is_worst, strict=True)],
            textposition="outside", textangle=0, cliponaxis=False, constraintext="none",
            hovertemplate="layer %{x}: %{y:.1f} %<extra></extra>",
        )
    )  # fmt: skip
    if not any(share is not None for share in shares):
        add_nothing(figure, mode, "no row was computed in this time")
    return finished(
        figure, mode, title="Resident rows by layer (worst marked)", y_title="%", legend="none", height=HEIGHT,
        x={"title": {"text": "layer"}, "dtick": max(1, len(found.layers) // 12)},
        y={"range": [0, 115], "tickvals": [0, 50, 100]},
    )  # fmt: skip


def worst_layers(shares: Sequence[float | None]) -> frozenset[int]:
    """Indices of the few lowest shares below 1, of equal ones the first. None where no layer is worse than another."""
    known = [(share, index) for index, share in enumerate(shares) if share is not None]
    if len({share for share, _ in known}) < 2:
        return frozenset()
    num_worst = min(MOST_WORST, max(1, len(shares) // 4))
    return frozenset(index for share, index in sorted(known)[:num_worst] if share < 1)


def _rows_and_words(page: ExpertsPage, words: list[list[str]]) -> list[list[tuple[str, int]]]:
    """By layer that has experts and expert: what it is, and its rows in the span (0 before two looks)."""
    found = []
    for layer, row in zip(page.residency.layers, words, strict=True):
        tokens = page.tokens[layer] if layer < len(page.tokens) else [0] * len(row)
        found.append(list(zip(row, tokens, strict=True)))
    return found
