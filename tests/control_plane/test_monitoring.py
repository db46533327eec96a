"""The shipped dashboard and alert rules: valid in form, and every metric that they name is in /metrics."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine

FOLDER = Path(__file__).parents[2] / "configs/monitoring"
RULES = FOLDER / "prometheus_alerts.yml"
DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8"))
WORDS = frozenset(  # of PromQL and Grafana
    ["sum", "avg", "max", "min", "rate", "increase", "histogram_quantile", "by", "on", "and", "label_values"]
)
NOT_OURS = frozenset({"up"})  # made by Prometheus for each scrape
LABELS = frozenset(
    {"instance", "job", "model_name", "engine", "le", "phase", "rung", "state", "reason", "controller", "status",
     "finished_reason", "promise", "layer", "expert", "method", "handler", "result"}
)  # fmt: skip


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries = [v["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return [*panels, *queries, *(rule["expr"] for rule in rules())]


def names(expression: str) -> set[str]:
    """Metrics of an expression: words that are no string, range, function or label."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    found = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare))
    return found - WORDS - LABELS - NOT_OURS


async def test_every_metric_that_is_named_is_exported(engine: FakeEngine) -> None:
    async with in_process(engine, make_config()) as client:
        exported = await _exported(client)
    named = {name for expression in expressions() for name in names(expression)}
    assert len(named) > 25
    assert named - exported == set()


async def _exported(client: httpx.AsyncClient) -> set[str]:
    """Sample names by the families that are there, whether they have samples yet or not."""
    text = (await client.get("/metrics")).text
    found: set[str] = set()
    for family in text_string_to_metric_families(text):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + ending for ending in endings}
    return found


def test_the_words_that_are_left_out_are_no_metrics() -> None:
    assert names('sum by (le) (rate(a_total{x="b_total"}[5m])) and on (instance) c > 0.9') == {
        "a_total",
        "c",
        "x",
    }


def test_parentheses_and_braces_close() -> None:
    for expression in expressions():
        bare = re.sub(r'"[^"]*"', "", expression)
        for left, right in ("()", "{}", "[]"):
            assert bare.count(left) == bare.count(right), expression
        assert "{}" not in bare


def test_alert_rules_have_what_prometheus_wants() -> None:
    data = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert set(data) == {"groups"}
    for group in data["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) >= 8
    for rule in found:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.search(r"[<>]=?|==", rule["expr"]), "an alert compares with something"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_what_grafana_wants() -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "timezone"} <= set(DASHBOARD)
    assert DASHBOARD["timezone"] == "utc"
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert {"type", "title", "datasource", "gridPos", "fieldConfig", "targets"} <= set(panel)
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"], "a plot without a unit"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["legendFormat"] for target in panel["targets"])
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert x + w <= 24
        cells = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == {"datasource", "model", "__rate_interval"}
