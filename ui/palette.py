"""Colours and layout that all plots share: Okabe and Ito's palette, which people tell apart whatever their colour vision.

Two variants of each colour, for light and for dark. What matters is never told by colour alone: lines differ in dashes,
states in words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy  # noqa: F401 - plotly uses numpy and pandas if they are loaded, even half loaded by another thread
import pandas  # noqa: F401
import plotly.graph_objects as go
import plotly.io

plotly.io.templates.default = None  # every colour is ours; the usual template would travel with each plot

Mode = Literal["light", "dark"]
STEPS = (1, 1.5, 2, 3, 5, 8, 10)
HEIGHT = 240  # pixels of a usual plot
HEAT = "Cividis"  # even steps of lightness, the same for red-green blind eyes


@dataclass(frozen=True, slots=True)
class Palette:
    """Named by what they stand for."""

    main: str
    second: str
    third: str
    fourth: str
    good: str
    warn: str
    bad: str
    quiet: str
    text: str
    grid: str

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.main, self.second, self.third, self.fourth, self.bad, self.quiet)


LIGHT = Palette(
    main="#0072B2", second="#D55E00", third="#009E73", fourth="#AA4499", good="#009E73", warn="#B87A00",
    bad="#C4401C", quiet="#8A8F98", text="#31333F", grid="#E3E6EB",
)  # fmt: skip
DARK = Palette(
    main="#56B4E9", second="#F0954F", third="#34C79C", fourth="#DD8FC0", good="#34C79C", warn="#E9B949",
    bad="#FF7A5C", quiet="#8D94A1", text="#E6E8EC", grid="#30343D",
)  # fmt: skip


def palette(mode: Mode) -> Palette:
    return DARK if mode == "dark" else LIGHT


def nice_top(values: Sequence[float | None], least: float) -> float:
    """The axis' end above `values`: one of STEPS times a power of ten, so that the axis does not move at every look."""
    greatest = 1.02 * max((v for v in values if v is not None), default=0.0)
    if greatest <= least or not math.isfinite(greatest):
        return least
    power = 10.0 ** math.floor(math.log10(greatest))
    return next(step * power for step in STEPS if step * power >= greatest)


def finished(
    figure: go.Figure,
    mode: Mode,
    *,
    title: str,
    y_title: str = "",
    height: int = HEIGHT,
    x: dict[str, Any] | None = None,
    y: dict[str, Any] | None = None,
    legend: Literal["above", "below", "none"] = "above",
    **more: Any,
) -> go.Figure:
    """Title, axes and margins; `uirevision` keeps a viewer's zoom when new data comes.

    more: further keys of plotly's layout.
    """
    colours = palette(mode)
    axis = {
        "gridcolor": colours.grid, "linecolor": colours.grid, "zerolinecolor": colours.grid, "automargin": True,
        "tickfont": {"color": colours.text, "size": 12},
    }  # fmt: skip
    layout: dict[str, Any] = dict(
        title={
            "text": title,
            "x": 0,
            "xanchor": "left",
            "font": {"size": 15, "color": colours.text},
            "y": 0.97,
        },
        height=height,
        margin={"l": 8, "r": 12, "t": 56 if legend == "above" else 34, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": colours.text, "size": 12},
        showlegend=legend != "none",
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.0 if legend == "above" else -0.18,
            "yanchor": "bottom" if legend == "above" else "top",
            "font": {"size": 12, "color": colours.text},
            "bgcolor": "rgba(0,0,0,0)",
        },
        xaxis={**axis, **(x or {})},
        yaxis={
            **axis,
            "title": {"text": y_title, "font": {"size": 12, "color": colours.text}},
            **(y or {}),
        },
        hovermode="x unified",
        hoverlabel={"font": {"size": 12}},
        uirevision="keep",
    )
    # Assigned at once: plotly takes ten times as long to change a layout piece by piece.
    figure.layout = figure.layout.to_plotly_json() | layout | more
    return figure
