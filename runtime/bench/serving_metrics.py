"""Figures of a replay: latencies, goodput, padding, use of rungs.

TTFT: arrival to first token. ITL: gap between two events of a stream; an event may bring several tokens, which its
reader sees at once, so gaps are counted by event. TPOT: a request's time after its first event over the tokens that
came in it. Goodput: requests whose TTFT and TPOT both kept the promise (`slo.ttft`, `slo.itl`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from runtime.bench.client import RequestTimes
from runtime.bench.replay import Played
from runtime.bench.report import summary
from runtime.config import SloConfig
from runtime.engine.stats import EngineSnapshot, RungSnapshot


def serving_metrics(played: Played, slo: SloConfig) -> dict[str, Any]:
    """Everything that is reported of one replay."""
    times, seconds = played.times, played.duration_s
    finished = [t for t in times if t.is_ok]
    good = sum(keeps_promise(t, slo) for t in finished)
    events = [n for t in times for n in t.event_tokens]
    return {
        "requests": len(times),
        "finished": len(finished),
        "not_finished": dict(Counter(t.error or "no answer" for t in times if not t.is_ok)),
        "duration_s": round(seconds, 2),
        "requests_s": round(len(finished) / seconds, 3),
        "prompt_tokens_s": round(sum(t.prompt_len for t in times) / seconds, 1),
        "output_tokens_s": round(sum(t.num_tokens for t in times) / seconds, 1),
        "ttft_s": summary([t.ttft_s for t in times if t.ttft_s is not None]),
        "itl_s": summary([gap for t in times for gap in t.gaps_s]),
        "tpot_s": summary([t.tpot_s for t in times if t.tpot_s is not None]),
        "e2e_s": summary([t.finished_s - t.arrival_s for t in finished if t.finished_s is not None]),
        "tokens_per_event": round(sum(events) / len(events), 2) if events else None,
        "goodput_requests_s": round(good / seconds, 3),
        "goodput_share": round(good / len(times), 4),
        "slo": {"ttft_s": slo.ttft, "itl_s": slo.itl},
        "busy_share": round(played.busy_share, 3),
        "latest_send_s": round(played.latest_send_s, 4),
        "padding": {phase: padding_share(played, phase) for phase in ("prefill", "decode")},
        "rungs": rung_use(played),
        "late_compiles": played.after.late_compiles - played.before.late_compiles,
        "preemptions": played.after.num_preemptions - played.before.num_preemptions,
        "prefix_hit_share": _prefix_hit_share(played.before, played.after),
    }


def keeps_promise(times: RequestTimes, slo: SloConfig) -> bool:
    """A request of one token has no time between tokens to keep."""
    return (
        times.ttft_s is not None
        and times.ttft_s <= slo.ttft
        and (times.tpot_s is None or times.tpot_s <= slo.itl)
    )


def padding_share(played: Played, phase: str) -> float | None:
    """(computed - real) / computed token positions of one phase; None if nothing was computed."""
    used = [rung for rung in rung_use(played) if rung["phase"] == phase]
    computed = sum(rung["computed_tokens"] for rung in used)
    real = sum(rung["real_tokens"] for rung in used)
    return round((computed - real) / computed, 4) if computed else None


def rung_use(played: Played) -> list[dict[str, Any]]:
    """What each rung did during the replay; rungs that were not used have zero hits."""
    earlier = {rung.name: rung for rung in played.before.rungs}
    return [_difference(earlier.get(rung.name), rung) for rung in played.after.rungs]


def metric_rows(metrics: dict[str, Any]) -> Sequence[Sequence[object]]:
    """Latency rows of the printed table, in milliseconds."""
    rows = []
    for key, name in (
        ("ttft_s", "TTFT ms"),
        ("itl_s", "ITL ms"),
        ("tpot_s", "TPOT ms"),
        ("e2e_s", "whole request ms"),
    ):
        found = metrics[key]
        values = (found[k] for k in ("mean", "p50", "p90", "p99"))
        rows.append((name, *(None if v is None else round(v * 1e3, 1) for v in values), found["n"]))
    return rows


def _difference(earlier: RungSnapshot | None, later: RungSnapshot) -> dict[str, Any]:
    hits, real, computed = (
        getattr(later, key) - (getattr(earlier, key) if earlier else 0)
        for key in ("hits", "real_tokens", "computed_tokens")
    )
    return {
        "name": later.name,
        "phase": str(later.phase),
        "hits": hits,
        "real_tokens": real,
        "computed_tokens": computed,
        "padding": round((computed - real) / computed, 4) if computed else None,
        "step_s": round(later.step_s, 5),
    }


def _prefix_hit_share(before: EngineSnapshot, after: EngineSnapshot) -> float | None:
    queries = after.prefix_queries - before.prefix_queries
    return round((after.prefix_hits - before.prefix_hits) / queries, 4) if queries else None
