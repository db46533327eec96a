"""Figures of one mode on one open-loop run: percentiles, goodput. The same for the engine and the virtual clock."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bench.client import RequestTimes
from runtime.bench.serving_metrics import keeps_promise
from runtime.config import SloConfig

MILLI = 1e3


def open_figures(times: Sequence[RequestTimes], duration_s: float, slo: SloConfig) -> dict[str, Any]:
    """Latencies in ms; `goodput` in requests/s that kept both promises."""
    good = sum(keeps_promise(t, slo) for t in times)
    e2e = e2e_s(times)
    return {
        "requests": len(times),
        "p50_ms": _ms(e2e, 50),
        "p99_ms": _ms(e2e, 99),
        "p50_ttft_ms": _ms([t.ttft_s for t in times if t.ttft_s is not None], 50),
        "p99_ttft_ms": _ms([t.ttft_s for t in times if t.ttft_s is not None], 99),
        "p99_itl_ms": _ms([gap for t in times for gap in t.gaps_s], 99),
        "p99_tpot_ms": _ms([t.tpot_s for t in times if t.tpot_s is not None], 99),
        "goodput": round(good / duration_s, 3),
        "goodput_share": round(good / len(times), 4),
        "duration_s": round(duration_s, 2),
    }


def e2e_s(times: Sequence[RequestTimes]) -> list[float]:
    """End-to-end latencies in order of arrival."""
    ordered = sorted(times, key=lambda t: t.arrival_s)
    return [t.finished_s - t.arrival_s for t in ordered if t.finished_s is not None]


def score(figures: dict[str, Any]) -> tuple[float, float]:
    """What "best" means when one static or fixed setting is chosen: goodput to 1 % of the requests, then p99."""
    return round(figures["goodput_share"], 2), -figures["p99_ms"]


def _ms(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)) * MILLI, 2) if values else 0.0
