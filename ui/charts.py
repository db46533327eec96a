"""Plots over time: a page's series as lines, bands and bars. Pure functions, wire types in, plotly figures out.

The time axis spans what was asked for even where nothing was seen, and the value axis begins at 0 and ends at a round
number, so that two looks at the same figure can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

import numpy as np
import plotly.graph_objects as go

from control_plane.console_schemas import ConsolePage, Series, Span
from ui.palette import HEIGHT, Mode, finished, nice_top, palette

SPAN_S: dict[Span, float] = {"15min": 900.0, "3h": 10_800.0, "24h": 86_400.0}
DASHES = ("solid", "dash", "dot", "dashdot")
FACTORS = {"s": 1.0, "ms": 1000.0, "%": 100.0}


@dataclass(frozen=True, slots=True)
class Look:
    """How a viewer looks: at which span, in which time zone (None: this machine's), on light or dark."""

    span: Span
    zone: tzinfo | None
    mode: Mode


def series_of(page: ConsolePage, name: str, label: str | None = None) -> list[Series]:
    """The page's series of a name: one, or its sisters with different labels."""
    return [s for s in page.series if s.name == name and (label is None or s.label == label)]


def axis_of(page: ConsolePage, look: Look) -> np.ndarray:
    """The page's times as an array: plotly checks lists item by item, which costs more than all the rest."""
    return np.array(moments(page.times, look.zone), dtype="datetime64[ms]")


def moments(times: Sequence[float], zone: tzinfo | None) -> list[datetime]:
    """Unix seconds as the viewer's time of day; plotly draws what it is given."""
    return [datetime.fromtimestamp(t, UTC).astimezone(zone).replace(tzinfo=None) for t in times]


def time_axis(page: ConsolePage, look: Look) -> dict[str, object]:
    """From the span's beginning to the page's time."""
    ends = moments([page.server_time - SPAN_S[look.span], page.server_time], look.zone)
    return {"range": ends, "type": "date", "nticks": 7}


def lines(
    page: ConsolePage,
    look: Look,
    title: str,
    unit: str,
    names: Mapping[str, str],
    *,
    least_top: float,
    top: float | None = None,
    promise: tuple[float, str] | None = None,
    is_filled: bool = False,
    height: int = HEIGHT,
) -> go.Figure:
    """Lines of the page's series. names: what the legend calls each series; every line has its colour and dash.

    unit: `ms` and `%` scale values given in seconds and shares. least_top: the least end of the value axis, in `unit`;
    top: the fixed one. promise: a level, in `unit`, with its name, drawn as a line across.
    """
    colours, factor = palette(look.mode), FACTORS.get(unit, 1.0)
    x = axis_of(page, look)
    figure, seen = go.Figure(), [promise[0]] if promise else []
    drawn = [(s, shown) for name, shown in names.items() for s in series_of(page, name)]
    for place, (series, shown) in enumerate(drawn):
        values = scaled(series.values, factor)
        seen.append(float(np.nanmax(values, initial=0.0)))
        colour = colours.lines[place % len(colours.lines)]
        figure.add_scatter(
            x=x,
            y=values,
            mode="lines",
            name=f"{shown} {series.label}".strip(),
            line={"color": colour, "width": 1.5, "dash": DASHES[place % len(DASHES)]},
            connectgaps=False,
            fill="tozeroy" if is_filled and place == 0 else None,
            fillcolor=faded(colour, 0.15) if is_filled and place == 0 else None,
            hovertemplate=f"%{{y:.4~g}} {unit}",
        )
    if promise:
        add_level(figure, promise[0], promise[1], look.mode)
    if not any(v is not None for s, _ in drawn for v in s.values):
        add_nothing(figure, look.mode)
    return finished(
        figure, look.mode, title=title, y_title=unit, height=height, x=time_axis(page, look),
        y={"range": [0, top if top is not None else nice_top(seen, least_top)]}, legend="above" if len(drawn) > 1 else "none",
    )  # fmt: skip


def stacked(
    page: ConsolePage, look: Look, title: str, unit: str, name: str, *, least_top: float
) -> go.Figure:
    """Sister series on top of each other, as many colours as there are."""
    colours, x = palette(look.mode), axis_of(page, look)
    figure, found = go.Figure(), series_of(page, name)
    totals = [0.0] * len(page.times)
    for place, series in enumerate(found):
        for index, value in enumerate(series.values):
            totals[index] += value or 0.0
        figure.add_scatter(
            x=x,
            y=scaled(series.values),
            mode="lines",
            stackgroup="all",
            name=series.label or series.name,
            line={"width": 0},
            fillcolor=faded(colours.lines[place % len(colours.lines)], 0.8),
            hovertemplate=f"%{{y:.3~g}} {unit}",
        )
    if not any(v for s in found for v in s.values):
        add_nothing(figure, look.mode)
    top = nice_top(totals, least_top)
    return finished(
        figure,
        look.mode,
        title=title,
        y_title=unit,
        x=time_axis(page, look),
        y={"range": [0, top]},
        legend="none",
    )


def gauge_band(
    page: ConsolePage,
    look: Look,
    title: str,
    unit: str,
    name: str,
    *,
    least_top: float,
    capacity: tuple[float, str] | None = None,
) -> go.Figure:
    """A gauge's mean as a line, its least and greatest sample as a band around it."""
    colours, x = palette(look.mode), axis_of(page, look)
    found = series_of(page, name)
    figure, seen = go.Figure(), [capacity[0]] if capacity else []
    for place, series in enumerate(found):
        colour = colours.lines[place % len(colours.lines)]
        if series.high and series.low:
            figure.add_scatter(
                x=x,
                y=scaled(series.high),
                mode="lines",
                line={"width": 0},
                showlegend=False,
                hoverinfo="skip",
            )
            figure.add_scatter(
                x=x, y=scaled(series.low), mode="lines", line={"width": 0}, fill="tonexty", fillcolor=faded(colour, 0.2),
                name="least to greatest", hoverinfo="skip",
            )  # fmt: skip
        figure.add_scatter(
            x=x, y=scaled(series.values), mode="lines", line={"color": colour, "width": 2}, name=series.label or "mean",
            hovertemplate=f"%{{y:.4~g}} {unit}",
        )  # fmt: skip
        seen += [v for v in (*series.values, *series.high) if v is not None]
    if capacity:
        add_level(figure, capacity[0], capacity[1], look.mode)
    if not any(v is not None for s in found for v in s.values):
        add_nothing(figure, look.mode)
    return finished(
        figure, look.mode, title=title, y_title=unit, x=time_axis(page, look), y={"range": [0, nice_top(seen, least_top)]}
    )  # fmt: skip


def scaled(values: Sequence[float | None], factor: float = 1.0) -> np.ndarray:
    """The values times a factor; a gap, which plotly leaves open, where there is none."""
    return np.array([np.nan if value is None else value * factor for value in values])


def add_level(figure: go.Figure, level: float, name: str, mode: Mode) -> None:
    """A line across the plot, named at its left end, where data is oldest."""
    colours = palette(mode)
    figure.add_hline(
        y=level,
        line={"color": colours.bad, "width": 1.5, "dash": "dash"},
        annotation={
            "text": name,
            "font": {"color": colours.bad, "size": 12},
            "xanchor": "left",
            "yanchor": "bottom",
        },
        annotation_position="top left",
    )


def add_nothing(figure: go.Figure, mode: Mode, text: str = "nothing was seen in this time") -> None:
    """Says that an empty plot is empty on purpose."""
    figure.add_annotation(
        text=text, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5,
        font={"size": 13, "color": palette(mode).quiet},
    )  # fmt: skip


def faded(colour: str, opacity: float) -> str:
    """`#rrggbb` with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
