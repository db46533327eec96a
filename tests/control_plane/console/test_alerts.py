"""Alerts: each from the state that it is about, the gravest first, with the time since when it stands."""

from dataclasses import replace
from typing import Any

import pytest

from control_plane.console.alerts import MIN_REQUESTS, AlertBook, Standing, judge
from control_plane.console.history import History
from control_plane.console.view import Alert
from control_plane.finding import Finding, Severity
from runtime.config import parse_config
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.stats import PromiseTotals
from tests.control_plane.ladders import snapshot_of

CALM = Standing(snapshot_of(), 0.1, True, None, parse_config({}), ())
FINDING = Finding("padding_waste", "decode", Severity.WARNING, "half of it is padding", {}, "less", None)


def ids(**facts: Any) -> list[str]:
    return [alert.id for alert in judge(replace(CALM, **facts))]


def test_a_server_that_does_well_has_none() -> None:
    assert ids() == []
    assert ids(snapshot=None, data_age_s=None) == []
    assert ids(data_age_s=99.0, snapshot=snapshot_of(state="loading")) == []
    assert ids(findings=(replace(FINDING, severity=Severity.INFO),)) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"load_error": "no such file", "snapshot": None}, "load_failed"),
        ({"snapshot": snapshot_of(state="failed"), "is_alive": False, "data_age_s": 99.0}, "engine_failed"),
        ({"is_alive": False}, "engine_stalled"),
        ({"data_age_s": 11.0}, "engine_silent"),
        ({"snapshot": snapshot_of(late_compiles=1)}, "late_compiles"),
        ({"snapshot": snapshot_of(num_waiting=410)}, "queue_full"),
        ({"findings": (FINDING,)}, "finding:padding_waste:decode"),
        ({"trial": 7}, "canary"),
        ({"pending_restart": ("kv_cache.page_size",)}, "pending_restart"),
        ({"problem": "the file has changed"}, "config_problem"),
    ],
)
def test_each_trouble_is_told_once(facts: dict[str, Any], expected: str) -> None:
    assert ids(**facts) == [expected]


def test_rungs_and_ladder() -> None:
    one, *rest = CALM.snapshot.rungs  # type: ignore[union-attr]
    failed = snapshot_of(rungs=(replace(one, state="failed"), *rest))
    assert ids(snapshot=failed) == ["rungs_failed"]
    change = LadderChange(1, LadderState.COMPILING, ("decode-3",))
    assert ids(snapshot=snapshot_of(ladder_change=change)) == ["ladder_compiling"]


@pytest.mark.parametrize(
    ("num", "kept", "expected"),
    [
        (MIN_REQUESTS - 1, 0, []),
        (100, 90, []),
        (100, 89, ["warning"]),
        (100, 49, ["critical"]),
    ],
)
def test_promises_are_judged_by_enough_requests(num: int, kept: int, expected: list[str]) -> None:
    history = History()
    history.add(snapshot_of(promises=PromiseTotals(500, 0)), 1e9)  # what was before does not count
    history.add(snapshot_of(promises=PromiseTotals(500 + num, kept)), 1e9 + 600)
    points = history.points("15min", 1e9 + 600)
    assert [alert.severity for alert in judge(replace(CALM, points=points))] == expected


def test_an_alert_keeps_its_time_until_it_goes_away() -> None:
    book = AlertBook()
    info, warning = Alert("a", "info", "", "overview"), Alert("b", "warning", "", "overview")
    assert [(x.id, x.since_s) for x in book.dated([info], 1.0)] == [("a", 1.0)]
    assert [(x.id, x.since_s) for x in book.dated([info, warning], 2.0)] == [("b", 2.0), ("a", 1.0)]
    assert book.dated([warning], 3.0)[0].since_s == 2.0
    assert [(x.id, x.since_s) for x in book.dated([info], 4.0)] == [("a", 4.0)]
