"""Plots that are not over the page's series: rungs, moves, experts, one request's way. Pure functions."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from control_plane.console_schemas import BucketsPage, ExpertsPage, Move, RungRow
from control_plane.request_schemas import RequestTimeline
from ui.charts import Look, add_nothing, moments, time_axis
from ui.palette import HEAT, Mode, finished, nice_top, palette
from ui.units import DASH

EVEN_TOP = 3.0  # the heat map's end: an expert with three times its even share
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
EVENT_WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "preempted",
    "first_token": "first token",
}


def rung_work(rungs: Sequence[RungRow], mode: Mode) -> go.Figure:
    """What each rung computed in the span, in its phase: asked for, and padding. Launches beside the name."""
    colours, figure = palette(mode), go.Figure()
    used = [rung for rung in rungs if rung.hits_span]
    names = [f"{rung.name}  ·  {rung.hits_span:,}" for rung in used]
    padding = [100 * (1 - (rung.occupancy_span or 0.0)) for rung in used]
    for label, values, colour in (
        ("asked for", [100 - value for value in padding], colours.main),
        ("padding", padding, colours.second),
    ):
        figure.add_bar(
            y=names, x=values, name=label, orientation="h", marker={"color": colour},
            hovertemplate="%{x:.1f} %", text=[f"{v:.0f} %" if v >= 8 else "" for v in values], textposition="inside",
            insidetextanchor="middle", textfont={"color": "#FFFFFF" if mode == "light" else "#111111"},
        )  # fmt: skip
    if not used:
        add_nothing(figure, mode, "no rung was used in this time")
    return finished(
        figure, mode, title="Use of each rung (rung · launches)", height=_rungs_height(len(used)),
        x={"range": [0, 100], "ticksuffix": " %"}, y={"autorange": "reversed"},
        barmode="stack", hovermode="y unified", bargap=0.25,
    )  # fmt: skip


def moves(page: BucketsPage, look: Look) -> go.Figure:
    """Every move of a number over time: the value that it was moved to, its reason as mark, colour and hover text."""
    colours, figure = palette(look.mode), go.Figure()
    shown = [move for move in page.moves if move.value is not None]
    reasons = sorted({(move.controller, move.reason) for move in shown})
    for place, (controller, reason) in enumerate(reasons):
        same = [move for move in shown if (move.controller, move.reason) == (controller, reason)]
        figure.add_scatter(
            x=moments([move.time for move in same], look.zone),
            y=[move.value for move in same],
            mode="markers",
            name=f"{words(controller)}: {words(reason)}",
            marker={
                "color": colours.lines[place % len(colours.lines)],
                "symbol": SYMBOLS[place % len(SYMBOLS)],
                "size": 9,
                "line": {"width": 1, "color": colours.grid},
            },
            customdata=[[number(move.previous), inputs_text(move)] for move in same],
            hovertemplate="%{customdata[0]} → %{y:g}<br>%{customdata[1]}",
        )
    if not shown:
        add_nothing(figure, look.mode, "no number was moved in this time")
    top = nice_top([move.value for move in shown], 8)
    num_used = sum(1 for rung in page.rungs if rung.hits_span)  # as high as the rungs beside it
    return finished(
        figure,
        look.mode,
        title="Moves and their reasons",
        y_title="moved to",
        height=max(320, _rungs_height(num_used)),
        legend="below",
        x=time_axis(page, look),
        y={"range": [0, top]},
        hovermode="closest",
    )


def expert_heat(page: ExpertsPage, mode: Mode) -> go.Figure:
    """Layer x expert: tokens over the layer's mean, so that 1 is even; cut at EVEN_TOP, the numbers in the hover text."""
    shares, tokens = [], page.tokens
    for row in tokens:
        mean = sum(row) / len(row) if row else 0.0
        shares.append([value / mean if mean else None for value in row])
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            customdata=tokens,
            colorscale=HEAT,
            zmin=0,
            zmax=EVEN_TOP,
            xgap=1,
            ygap=1,
            colorbar={
                "title": {"text": "x even"},
                "tickvals": [0, 1, 2, 3],
                "ticktext": ["0", "1", "2", "≥ 3"],
                "thickness": 14,
            },
            hovertemplate="layer %{y}, expert %{x}<br>%{z:.2f} x even, %{customdata:,} tokens<extra></extra>",
        )
    )
    if not any(any(row) for row in tokens):
        add_nothing(figure, mode, "no token was routed in this time")
    x_step, y_step = max(1, page.num_experts // 16), max(1, page.num_layers // 12)
    return finished(
        figure,
        mode,
        title="Load of every expert (1 = even share of its layer)",
        y_title="layer",
        height=140 + 22 * max(4, page.num_layers),
        legend="none",
        x={
            "title": {"text": "expert"},
            "range": [-0.5, page.num_experts - 0.5],
            "showgrid": False,
            "dtick": x_step,
        },
        y={"range": [page.num_layers - 0.5, -0.5], "showgrid": False, "dtick": y_step},
        hovermode="closest",
    )


def layer_imbalance(page: ExpertsPage, mode: Mode) -> go.Figure:
    """Busiest expert over the mean, by layer."""
    colours = palette(mode)
    figure = go.Figure(
        go.Bar(
            x=list(range(len(page.imbalance))), y=page.imbalance, marker={"color": colours.main},
            hovertemplate="layer %{x}: %{y:.2f}<extra></extra>",
        )
    )  # fmt: skip
    figure.add_hline(y=1.0, line={"color": colours.good, "dash": "dash", "width": 1.5})
    return finished(
        figure, mode, title="Busiest expert by layer (1 = even)", y_title="x mean", legend="none",
        x={"title": {"text": "layer"}, "dtick": 1}, y={"range": [0, nice_top(page.imbalance, 2)]},
    )  # fmt: skip


def request_way(timeline: RequestTimeline, mode: Mode) -> go.Figure:
    """One request: queue, prefill, rungs, preemptions, in milliseconds after its arrival."""
    colours, figure = palette(mode), go.Figure()
    parts: list[tuple[str, str, float, float, str]] = []
    if timeline.queue_s:
        parts.append(("queue", colours.quiet, 0.0, timeline.queue_s, "waited for a row"))
    for event in timeline.events:
        if event.kind in ("prefill", "decode"):
            colour = colours.second if event.kind == "prefill" else colours.main
            text = f"{event.rung}: {event.tokens} tokens in {event.launches or 1} launches"
            parts.append((event.rung or event.kind, colour, event.offset_s, event.duration_s, text))
    for row, colour, start_s, length_s, text in parts:
        figure.add_bar(
            y=[row], x=[1000 * length_s], base=[1000 * start_s], orientation="h", marker={"color": colour},
            hovertemplate=f"{text}<br>from {1000 * start_s:.1f} ms, {1000 * length_s:.1f} ms<extra></extra>", showlegend=False,
        )  # fmt: skip
    end_s = max([timeline.e2e_s or 0.0, *(e.offset_s + e.duration_s for e in timeline.events)], default=0.0)
    for event in timeline.events:
        if event.kind in ("first_token", "preempted", "finished"):
            colour = colours.bad if event.kind == "preempted" else colours.good
            figure.add_vline(
                x=1000 * event.offset_s, line={"color": colour, "dash": "dot", "width": 1.5},
                annotation={"text": words(event.kind), "font": {"color": colour, "size": 11}, "textangle": 0},
                annotation_position="top left" if event.kind == "finished" else "top right",
            )  # fmt: skip
    rows = list(dict.fromkeys(part[0] for part in parts))
    return finished(
        figure, mode, title="This request's way through the engine", height=120 + 30 * max(2, len(rows)), legend="none",
        x={"title": {"text": "ms after arrival"}, "range": [0, nice_top([1000 * end_s], 10)]},
        y={"categoryorder": "array", "categoryarray": rows[::-1]},
        barmode="overlay", hovermode="closest", margin={"t": 60},
    )  # fmt: skip


def token_arrivals(offsets_s: Sequence[float], promise_s: float | None, mode: Mode) -> go.Figure:
    """Gaps between the events of a stream as this console saw them, in the order of their coming."""
    colours = palette(mode)
    gaps = [1000 * (b - a) for a, b in pairwise(offsets_s)]
    figure = go.Figure(
        go.Bar(
            x=list(range(2, len(gaps) + 2)), y=gaps, marker={"color": colours.main},
            hovertemplate="event %{x}: %{y:.1f} ms after the one before<extra></extra>",
        )
    )  # fmt: skip
    levels = []
    if promise_s is not None:
        levels = [1000 * promise_s]
        figure.add_hline(y=levels[0], line={"color": colours.bad, "dash": "dash", "width": 1.5})
    return finished(
        figure, mode, title="Gap before each event of the stream", y_title="ms", legend="none",
        x={"title": {"text": "event"}, "range": [0.5, max(10, len(gaps) + 1) + 0.5]},
        y={"range": [0, nice_top([*gaps, *levels], 10)]},
    )  # fmt: skip


def demand(found: Sequence[Mapping[str, Any]], title: str, rungs: Sequence[int], mode: Mode) -> go.Figure:
    """How many steps asked for how many positions, with the rungs as lines: what a learned ladder learns from."""
    colours = palette(mode)
    figure = go.Figure(
        go.Bar(
            x=[row["positions"] for row in found], y=[row["steps"] for row in found],
            marker={"color": colours.main, "line": {"width": 0}}, hovertemplate="%{x} positions: %{y:,} steps<extra></extra>",
        )
    )  # fmt: skip
    for size in rungs:
        figure.add_vline(x=size, line={"color": colours.second, "dash": "dot", "width": 1})
    if not found:
        add_nothing(figure, mode, "no step yet")
    return finished(
        figure, mode, title=title, y_title="steps", legend="none",
        x={"title": {"text": "positions asked for (lines: rungs)"}, "range": [0, max(rungs, default=8) * 1.05]},
        y={"range": [0, nice_top([row["steps"] for row in found], 10)]},
    )  # fmt: skip


def inputs_text(move: Move) -> str:
    """A decision's numbers in one line."""
    return ", ".join(f"{name} {number(value)}" for name, value in move.inputs.items() if value is not None)


def words(name: str) -> str:
    return name.replace("_", " ")


def number(value: Any) -> str:
    """A number of a decision in four digits that matter."""
    return f"{value:.4g}" if isinstance(value, float) else DASH if value is None else str(value)


def _rungs_height(num_rungs: int) -> int:
    return 96 + 24 * max(4, num_rungs)
