"""View: everything that a page is made from, gathered on the event loop's thread, read in a worker's. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from control_plane.console.device_watch import DeviceFigures
from control_plane.console.history import STEP_S, TICK_S, ExpertPoint, Point
from control_plane.console.lines import Lines
from control_plane.console.prices import NO_PRICES, PriceBook
from control_plane.finding import Finding
from runtime.config import EngineConfig
from runtime.engine.stats import EngineSnapshot

NO_FIGURES = DeviceFigures()


@dataclass(frozen=True, slots=True)
class Move:
    """A number that a controller moved, or a change of the ladder. time_s: Unix."""

    time_s: float
    number: int
    controller: str
    previous: float | None
    value: float | None
    reason: str
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that somebody should look at; `page` is where it is explained. since_s: Unix."""

    id: str
    severity: str
    text: str
    page: str
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """now_s, Unix, and data_age_s are of the moment that it was gathered. What a page does not need is left empty.

    snapshot: None while nothing is loaded. points, experts: of the span; recent, recent_experts: of the last seconds.
    """

    page: str
    span: str
    now_s: float
    data_age_s: float | None
    state: str
    error: str
    model: str
    revision: int | None
    config: EngineConfig
    snapshot: EngineSnapshot | None
    points: tuple[Point, ...]
    recent: tuple[Point, ...] = ()
    day: tuple[Point, ...] = ()
    experts: tuple[ExpertPoint, ...] = ()
    recent_experts: tuple[ExpertPoint, ...] = ()
    devices: DeviceFigures = NO_FIGURES
    num_open_calls: int = 0
    moves: tuple[Move, ...] = ()
    reasons: Mapping[tuple[str, str], int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    window_s: float | None = None
    alerts: tuple[Alert, ...] = ()
    audit: tuple[dict[str, Any], ...] = ()
    prices: PriceBook = NO_PRICES


def envelope(
    view: View, lines: Lines | None = None, series: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What every page begins with (console_schemas.ConsolePage)."""
    return {
        "page": view.page,
        "span": view.span,
        "version": view.revision,
        "server_time": view.now_s,
        "data_age_s": view.data_age_s,
        "tick_s": TICK_S,
        "state": view.state,
        "error": view.error,
        "model": view.model,
        "step_s": STEP_S[view.span],
        "times": lines.times.round(3) if lines is not None else [],
        "series": series or [],
    }
