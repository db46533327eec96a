"""What somebody should look at, from state that is known anyway; AlertBook remembers since when. No HTTP."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from control_plane.console.history import Point
from control_plane.console.lines import Lines
from control_plane.console.view import Alert
from control_plane.finding import Finding, Severity
from runtime.config import EngineConfig
from runtime.engine.change import LadderState
from runtime.engine.stats import EngineSnapshot

SILENT_S = 10.0  # an idle engine writes a snapshot many times a second
MIN_REQUESTS = 20
LOW_ATTAINMENT, VERY_LOW_ATTAINMENT = 0.9, 0.5
QUEUE_SHARE = 0.8  # of the length at which requests are refused


@dataclass(frozen=True, slots=True)
class Standing:
    """What alerts are judged by. points: of the last 15 minutes."""

    snapshot: EngineSnapshot | None
    data_age_s: float | None
    is_alive: bool
    load_error: str | None
    config: EngineConfig
    points: tuple[Point, ...]
    findings: tuple[Finding, ...] = ()
    trial: int | None = None  # the revision on trial
    pending_restart: tuple[str, ...] = ()
    problem: str = ""  # of the stored configuration


def judge(standing: Standing) -> Iterator[Alert]:
    """The alerts of now, the gravest first within each source; `since_s` is not set."""
    s = standing.snapshot
    if standing.load_error is not None:
        yield Alert(
            "load_failed", "critical", f"The model could not be loaded: {standing.load_error}", "overview"
        )
    if s is not None:
        yield from _engine(standing, s)
    yield from _promises(standing)
    for finding in standing.findings:
        if finding.severity is not Severity.INFO:
            yield Alert(f"finding:{finding.id}", finding.severity, finding.symptom, "diagnosis")
    if standing.problem:
        yield Alert("config_problem", "warning", standing.problem, "audit")
    if standing.trial is not None:
        yield Alert("canary", "info", f"Revision {standing.trial} is on trial.", "tuning")
    if standing.pending_restart:
        names = ", ".join(standing.pending_restart[:5])
        yield Alert("pending_restart", "info", f"Waits for a restart: {names}", "tuning")


def _engine(standing: Standing, s: EngineSnapshot) -> Iterator[Alert]:
    if s.state == "failed":
        yield Alert("engine_failed", "critical", f"The engine has failed: {s.error}", "overview")
    elif not standing.is_alive:
        yield Alert("engine_stalled", "critical", "Work is queued and no step is made.", "overview")
    elif standing.data_age_s is not None and standing.data_age_s > SILENT_S and s.state != "loading":
        text = f"The engine has said nothing for {standing.data_age_s:.0f} s."
        yield Alert("engine_silent", "warning", text, "overview")
    if failed := [rung.name for rung in s.rungs if rung.state == "failed"]:
        yield Alert("rungs_failed", "warning", f"Could not be compiled: {', '.join(failed[:5])}", "buckets")
    if s.late_compiles:
        yield Alert("late_compiles", "warning", f"{s.late_compiles} compiles while serving", "buckets")
    limit = standing.config.server.max_queued_requests
    if s.num_waiting >= QUEUE_SHARE * limit:
        text = f"{s.num_waiting} requests wait; at {limit} they are refused."
        yield Alert("queue_full", "warning", text, "overview")
    if s.ladder_change.state is LadderState.COMPILING:
        num = len(s.ladder_change.rungs_to_add)
        yield Alert("ladder_compiling", "info", f"{num} rungs compile; the old ladder serves.", "buckets")


def _promises(standing: Standing) -> Iterator[Alert]:
    lines = Lines(standing.points)
    kept = lines.quotient("kept", "requests")
    if kept is None or lines.gained("requests") < MIN_REQUESTS or kept >= LOW_ATTAINMENT:
        return
    severity = "critical" if kept < VERY_LOW_ATTAINMENT else "warning"
    text = f"{100 * kept:.0f} % of the requests of the last 15 minutes were served as promised."
    yield Alert("slo", severity, text, "overview")


class AlertBook:
    """Since when each alert stands. Owned by one thread; as large as the alerts of now."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def dated(self, alerts: Iterable[Alert], now_s: float) -> tuple[Alert, ...]:
        """The alerts with `since_s`, gravest and then oldest first. One that went away and came back starts anew."""
        found = list(alerts)
        self._since = {alert.id: self._since.get(alert.id, now_s) for alert in found}
        dated = [replace(alert, since_s=self._since[alert.id]) for alert in found]
        order = {"critical": 0, "warning": 1, "info": 2}
        return tuple(sorted(dated, key=lambda alert: (order[alert.severity], alert.since_s)))
