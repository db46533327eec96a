"""The overview page: how the server does, whether promises are kept, what to look at, what was changed. Pure."""

from datetime import datetime
from typing import Any

import numpy as np

from control_plane.console.lines import Lines, Series, ratio, series
from control_plane.console.view import Alert, View, envelope

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
NUM_CHANGES = 10


def overview(view: View) -> dict[str, Any]:
    lines = Lines(view.points)
    return envelope(view, lines, _series(lines)) | {
        "now": _now(view),
        "promises": _promises(view, lines),
        "percentiles": [_percentiles(name, lines) for name in ("ttft", "itl", "e2e", "queue")],
        "alerts": [alert_body(alert) for alert in view.alerts],
        "recent_changes": [_change(entry) for entry in view.audit[:NUM_CHANGES]],
    }


def alert_body(alert: Alert) -> dict[str, Any]:
    return {
        "id": alert.id,
        "severity": alert.severity,
        "text": alert.text,
        "page": alert.page,
        "since": alert.since_s,
    }


def _series(lines: Lines) -> list[Series]:
    quantiles = [
        lines.quantile(f"{name}_{label}", name, quantile)
        for name in ("ttft", "itl")
        for label, quantile in QUANTILES
    ]
    kept = series("slo_attainment", "share", ratio(lines.delta("kept"), lines.delta("requests")))
    return [
        *quantiles,
        lines.quantile("e2e_p99", "e2e", 0.99),
        lines.quantile("queue_p99", "queue", 0.99),
        lines.rate("generation_tokens", "tokens/s"),
        lines.rate("prompt_tokens", "tokens/s", "prefill_real"),
        lines.rate("requests", "1/s"),
        lines.rate("goodput", "1/s", "kept"),
        lines.rate("preemptions", "1/s"),
        lines.rate("rejections", "1/s", "rejected"),
        kept,
        lines.busy(),
        lines.gauge("kv_use", "share"),
        lines.gauge("running", "requests"),
        lines.gauge("waiting", "requests"),
    ]


def _now(view: View) -> dict[str, Any] | None:
    s = view.snapshot
    if s is None:
        return None
    recent = Lines(view.recent)
    busy = recent.per_second("busy_s")
    return {
        "uptime_s": s.uptime_s,
        "num_running": s.num_running,
        "num_waiting": s.num_waiting,
        "waiting_tokens": s.waiting_tokens,
        "num_open_calls": view.num_open_calls,
        "batch_size": s.policy.batch_size,
        "micro_batch_size": s.policy.micro_batch_size,
        "kv_use": s.used_pages / s.num_pages if s.num_pages else None,
        "busy_share": None if busy is None else min(1.0, busy),
        "generation_tokens_s": recent.per_second("generation_tokens"),
        "prompt_tokens_s": recent.per_second("prefill_real"),
        "requests_s": recent.per_second("requests"),
        "num_rungs": len(s.rungs),
        "num_rungs_ready": sum(rung.state == "ready" for rung in s.rungs),
        "late_compiles": s.late_compiles,
        "num_preemptions": s.num_preemptions,
    }


def _promises(view: View, lines: Lines) -> dict[str, Any] | None:
    if view.snapshot is None:
        return None
    return {
        "ttft_s": view.config.slo.ttft,
        "itl_s": view.config.slo.itl,
        "num_requests": int(lines.gained("requests")),
        "num_kept": int(lines.gained("kept")),
        "attainment": lines.quotient("kept", "requests"),
        "goodput_s": lines.per_second("kept"),
        "num_ttft_missed": int(lines.gained("ttft_missed")),
        "num_itl_missed": int(lines.gained("itl_missed")),
    }


def _percentiles(name: str, lines: Lines) -> dict[str, Any]:
    counts = lines.observed(name)
    found = {f"{label}_s": lines.percentile(name, quantile) for label, quantile in QUANTILES}
    return {"name": name, "num_seen": 0 if counts is None else int(np.sum(counts))} | found


def _change(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of the audit, which is bounded and redacted already."""
    return {
        "number": entry["number"],
        "time": datetime.fromisoformat(entry["time"]).timestamp(),
        "event": str(entry.get("event", "")),
        "actor": str(entry.get("actor", "")),
        "reason": str(entry.get("reason", "")),
        "result": str(entry.get("result", "")),
        "revision": entry.get("revision", entry.get("about")),
        "changes": entry.get("changes", []),
    }
