"""Finding: a trouble that was recognised, with the change that helps; Window: what the rules look at. No HTTP.

A patch is offered only if the configuration takes it, it is not in force already, and this version acts on it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from control_plane.config_document import checked, document, no_effect
from control_plane.errors import InvalidConfig
from control_plane.merge_patch import diff, leaves, merge, nested
from runtime.config import EngineConfig
from runtime.engine.stats import EngineSnapshot

WINDOW_S = 120.0  # long enough for some hundred requests, short enough to see a trouble come and go
MIN_WINDOW_S = 10.0  # below it one long request is the whole picture
SAMPLE_PERIOD_S = 5.0

type Patch = dict[str, Any]
type Evidence = Mapping[str, float | int | str]


class Severity(StrEnum):
    """How soon someone should look: critical loses work or time now, warning will, info explains."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble that was recognised. `id` is kind and subject, the same as long as the trouble lasts.

    patch: a merge patch, or None; then `why_no_patch` says why.
    """

    kind: str
    subject: str
    severity: Severity
    symptom: str
    evidence: Evidence
    expected_effect: str
    patch: Patch | None
    why_no_patch: str = ""

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.subject}"


@dataclass(frozen=True, slots=True)
class Window:
    """Snapshots by time, oldest first, at least two; the seconds between the first and the last."""

    series: tuple[EngineSnapshot, ...]
    seconds: float

    @property
    def first(self) -> EngineSnapshot:
        return self.series[0]

    @property
    def last(self) -> EngineSnapshot:
        return self.series[-1]

    @property
    def busy_share(self) -> float:
        return min(1.0, (self.last.busy_s - self.first.busy_s) / self.seconds)


class SnapshotHistory:
    """The snapshots of the last WINDOW_S. Owned by one thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, EngineSnapshot]] = deque()

    def add(self, time_s: float, snapshot: EngineSnapshot) -> None:
        """A snapshot taken at `time_s` (monotonic); one within SAMPLE_PERIOD_S of the one before replaces it unless
        that is the oldest, so that the window always ends now."""
        while self._kept and time_s - self._kept[0][0] > WINDOW_S:
            self._kept.popleft()
        if len(self._kept) > 2 and self._kept[-1][0] - self._kept[-2][0] < SAMPLE_PERIOD_S:
            self._kept.pop()
        self._kept.append((time_s, snapshot))

    def window(self) -> Window | None:
        """None until MIN_WINDOW_S are seen."""
        if len(self._kept) < 2 or (seconds := self._kept[-1][0] - self._kept[0][0]) < MIN_WINDOW_S:
            return None
        return Window(tuple(snapshot for _, snapshot in self._kept), seconds)


def only_what_helps(finding: Finding, config: EngineConfig) -> Finding:
    """The finding with its patch cut to the fields that differ and do something, or without it and with the reason."""
    if finding.patch is None:
        return finding
    current = document(config)
    try:
        wanted = diff(current, document(checked(merge(current, finding.patch))))
    except InvalidConfig as fault:
        return replace(finding, patch=None, why_no_patch=fault.message)
    if not wanted:
        return replace(finding, patch=None, why_no_patch="what would help is in force already")
    idle = [why for path, _ in leaves(wanted) if (why := no_effect(path)) is not None]
    useful = nested((path, value) for path, value in leaves(wanted) if no_effect(path) is None)
    return replace(finding, patch=useful or None, why_no_patch="" if useful else idle[0])
