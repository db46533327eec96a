"""Plots of the economics page: cost against income by hour, what a million tokens cost by phase. Pure functions."""

from collections.abc import Sequence
from datetime import tzinfo

import plotly.graph_objects as go

from control_plane.console_schemas import LedgerRow, PhaseCost
from ui.charts import add_nothing, moments
from ui.palette import Mode, finished, nice_top, palette

HOUR_S = 3600.0
BAR_MS = 0.4 * 1000 * HOUR_S  # plotly measures widths on a time axis in milliseconds


def hourly(rows: Sequence[LedgerRow], zone: tzinfo | None, mode: Mode, title: str) -> go.Figure:
    """Cost and theoretical income of each hour, in USD an hour; a bar for each, side by side."""
    colours, figure = palette(mode), go.Figure()
    x = moments([_hour(row) for row in rows], zone)
    values: list[float | None] = []
    for place, (name, colour, pattern, found) in enumerate(
        (
            ("cost", colours.second, "/", [row.cost_usd for row in rows]),
            ("theoretical income", colours.third, "", [row.income_usd for row in rows]),
        )
    ):
        figure.add_bar(
            x=x, y=found, name=name, marker={"color": colour, "pattern": {"shape": pattern}}, hovertemplate="%{y:,.4~g} USD",
            width=BAR_MS, offset=place * BAR_MS,
        )  # fmt: skip
        values += found
    if not any(value is not None for value in values):
        add_nothing(figure, mode, "no price was in force")
    ends = (
        moments([_hour(rows[0]) - 0.2 * HOUR_S, max(rows[-1].end, _hour(rows[0]) + 6 * HOUR_S)], zone)
        if rows
        else None
    )
    return finished(
        figure, mode, title=title, y_title="USD in the hour", legend="below", x={"type": "date", "range": ends},
        y={"range": [0, nice_top(values, 0.01)]}, height=280,
        barmode="overlay",
    )  # fmt: skip


def tokens_by_hour(rows: Sequence[LedgerRow], zone: tzinfo | None, mode: Mode) -> go.Figure:
    """Input, cached input and output tokens of each hour on top of each other."""
    colours, figure = palette(mode), go.Figure()
    x = moments([_hour(row) for row in rows], zone)
    for name, colour, found in (
        ("output", colours.main, [row.output_tokens for row in rows]),
        ("input", colours.second, [row.input_tokens for row in rows]),
        ("cached input", colours.quiet, [row.cached_input_tokens for row in rows]),
    ):
        figure.add_bar(
            x=x,
            y=found,
            name=name,
            marker={"color": colour},
            hovertemplate="%{y:,} tokens",
            width=2 * BAR_MS,
            offset=0,
        )
    totals = [row.output_tokens + row.input_tokens + row.cached_input_tokens for row in rows]
    ends = (
        moments([_hour(rows[0]) - 0.2 * HOUR_S, max(rows[-1].end, _hour(rows[0]) + 6 * HOUR_S)], zone)
        if rows
        else None
    )
    return finished(
        figure, mode, title="Tokens in each hour", y_title="tokens", legend="below", x={"type": "date", "range": ends},
        y={"range": [0, nice_top(totals, 1000)]}, height=280,
        barmode="stack",
    )  # fmt: skip


def phase_cost(phases: Sequence[PhaseCost], mode: Mode) -> go.Figure:
    """USD for a million tokens by phase: for the time the device worked on it, and with its share of idle time."""
    colours, figure = palette(mode), go.Figure()
    names = [phase.phase for phase in phases]
    values: list[float | None] = []
    for label, colour, pattern, found in (
        ("while it works", colours.main, "", [phase.usd_per_million_busy for phase in phases]),
        ("idle time included", colours.quiet, "/", [phase.usd_per_million_loaded for phase in phases]),
    ):
        figure.add_bar(
            y=names, x=found, name=label, orientation="h", marker={"color": colour, "pattern": {"shape": pattern}},
            hovertemplate="%{x:.4~g} USD", text=["" if v is None else f"{v:.3g}" for v in found], textposition="outside",
        )  # fmt: skip
        values += found
    return finished(
        figure,
        mode,
        title="USD for a million tokens",
        legend="below",
        height=280,
        x={"range": [0, 1.25 * max((v for v in values if v is not None), default=0.01)], "nticks": 5},
        y={"autorange": "reversed"},
        barmode="group",
        hovermode="y unified",
    )


def _hour(row: LedgerRow) -> float:
    """The beginning of the clock's hour, so that a row that began within it stands in its place."""
    return row.start - row.start % HOUR_S
