"""The economics page: prices by date, this server's ledger, the published day beside it. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import isinf
from typing import Any

import numpy as np

from control_plane.console.history import Point
from control_plane.console.ledger import (
    DAY6_LABEL,
    DAY6_SOURCE,
    HOUR_S,
    Account,
    Usage,
    account,
    by_hour,
    day6,
)
from control_plane.console.lines import Lines, Series, ratio, series
from control_plane.console.prices import PER_MILLION, Price, PriceBook
from control_plane.console.view import View, envelope

DAY_S = 86_400.0


def economics(view: View) -> dict[str, Any]:
    lines, day = Lines(view.points), Lines(view.day)
    usages = usages_of(day, view.day)
    own = account(usages, view.prices)
    price_now = view.prices.at(view.now_s)
    total, hours = day6()
    return envelope(view, lines, _series(lines, view.points, view.prices)) | {
        "prices": [_price(p) for p in view.prices.between(view.now_s - DAY_S, float("inf"))],
        "price_now": _price(price_now) if price_now else None,
        "ledger": {
            "available": own is not None and own.cost_usd is not None,
            "reason": _why_not(own, price_now),
            "label": "this server, the last 24 hours at most",
            "source": "its own token counts and running time, at the prices of the time",
            "total": own.row() if own else None,
            "hours": [found.row() for found in by_hour(usages, view.prices)],
            "phases": _phases(day, own) if own else [],
        },
        "example": {
            "available": True,
            "label": DAY6_LABEL,
            "source": DAY6_SOURCE,
            "total": total.row(),
            "hours": [found.row() for found in hours],
        },
    }


def usages_of(lines: Lines, points: Sequence[Point]) -> list[Usage]:
    """One for each interval between two points, of one worker; a process that was stopped has no points."""
    prompt, cached = lines.delta("prompt_tokens"), lines.delta("cached_prompt_tokens")
    output, busy = lines.delta("generation_tokens"), lines.delta("busy_s")
    return [
        Usage(
            before.time_s,
            after.time_s,
            float(prompt[i] - cached[i]),
            float(cached[i]),
            float(output[i]),
            max(0.0, after.time_s - before.time_s) / HOUR_S,
            float(busy[i]),
        )
        for i, (before, after) in enumerate(pairwise(points))
    ]


def _why_not(own: Account | None, price_now: Price | None) -> str:
    if own is None:
        return "nothing has been measured yet"
    if own.cost_usd is not None:
        return ""
    if price_now is None:
        return "no price is set: see economics.input_price, output_price and worker_price"
    return "nothing has been measured since the price holds"


def _series(lines: Lines, points: Sequence[Point], book: PriceBook) -> list[Series]:
    accounts = [account([usage], book) for usage in usages_of(lines, points)]
    hours = np.array([a.usage.worker_hours if a else np.nan for a in accounts])
    cost = np.array([np.nan if a is None or a.cost_usd is None else a.cost_usd for a in accounts])
    income = np.array([np.nan if a is None or a.income_usd is None else a.income_usd for a in accounts])
    idle = np.array([np.nan if a is None or a.idle_share is None else a.idle_share for a in accounts])
    return [
        series("cost", "USD/h", ratio(cost, hours)),
        series("income", "USD/h", ratio(income, hours)),
        series("idle_share", "share", idle),
    ]


def _phases(day: Lines, own: Account) -> list[dict[str, Any]]:
    """Cost by the time that the device worked on a phase, alone and with its share of the idle time."""
    busy_all = day.gained("prefill_busy_s") + day.gained("decode_busy_s")
    priced_hours = own.usage.worker_hours * own.priced_share
    usd_per_s = None
    if own.cost_usd is not None and priced_hours > 0:
        usd_per_s = own.cost_usd / (priced_hours * HOUR_S)
    found = []
    for phase in ("prefill", "decode"):
        tokens, busy_s = day.gained(f"{phase}_real"), day.gained(f"{phase}_busy_s")
        busy_usd = loaded_usd = None
        if usd_per_s is not None and tokens > 0:
            busy_usd = usd_per_s * busy_s / tokens * PER_MILLION
            if busy_all > 0:
                loaded_s = own.usage.worker_hours * HOUR_S * busy_s / busy_all
                loaded_usd = usd_per_s * loaded_s / tokens * PER_MILLION
        found.append(
            {
                "phase": phase,
                "tokens": int(tokens),
                "busy_s": busy_s,
                "usd_per_million_busy": busy_usd,
                "usd_per_million_loaded": loaded_usd,
            }
        )
    return found


def _price(price: Price) -> dict[str, Any]:
    return {
        "since": None if isinf(price.since_s) else price.since_s,
        "revision": price.revision,
        "input": price.input,
        "cached_input": price.cached_input,
        "output": price.output,
        "worker_hour": price.worker_hour,
    }
