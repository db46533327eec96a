"""Ledger: cost against theoretical income, hour by hour, from token counts, worker-hours and the prices of the time.

One function for this server's own day and for the published one. Pure.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from control_plane.console.prices import Price, PriceBook

HOUR_S = 3600.0
DAY6_LABEL = "DeepSeek-V3/R1, 27 to 28 February 2025 (public figures)"
DAY6_SOURCE = (
    "deepseek-ai/open-infra-index, day 6 of the open-source week (CC0-1.0): tokens, prices and average nodes as stated; "
    "nodes and load by hour read off its charts. R1's prices for all tokens, as published: an upper bound of income."
)
# Unix seconds of 27 February 2025 12:00 at UTC+8.
_DAY6_START_S = 1_740_628_800.0
_DAY6_TOKENS = (266e9, 342e9, 168e9)  # input computed, input found in the cache, output
_DAY6_GPUS_PER_NODE = 8
_DAY6_PRICE = Price(float("-inf"), None, input=0.55, cached_input=0.14, output=2.19, worker_hour=2.0)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used in [start_s, end_s), Unix: tokens, hours of workers, and busy seconds of them (None: not known)."""

    start_s: float
    end_s: float
    input_tokens: float  # computed
    cached_tokens: float
    output_tokens: float
    worker_hours: float
    busy_s: float | None = None

    def part(self, share: float, start_s: float, end_s: float) -> "Usage":
        busy_s = None if self.busy_s is None else self.busy_s * share
        return Usage(
            start_s,
            end_s,
            self.input_tokens * share,
            self.cached_tokens * share,
            self.output_tokens * share,
            self.worker_hours * share,
            busy_s,
        )


@dataclass(frozen=True, slots=True)
class Account:
    """Usage with its money: of the part that had a price, `priced_share` of the worker-hours; None where none had."""

    usage: Usage
    cost_usd: float | None
    income_usd: float | None
    priced_share: float

    @property
    def idle_share(self) -> float | None:
        usage = self.usage
        if usage.busy_s is None or usage.worker_hours <= 0:
            return None
        return max(0.0, 1.0 - usage.busy_s / (usage.worker_hours * HOUR_S))

    @property
    def margin(self) -> float | None:
        """(income - cost) / cost."""
        if self.cost_usd is None or self.income_usd is None or self.cost_usd <= 0:
            return None
        return (self.income_usd - self.cost_usd) / self.cost_usd

    def row(self) -> dict[str, Any]:
        """As on the wire (console_schemas.LedgerRow)."""
        usage = self.usage
        return {
            "start": usage.start_s,
            "end": usage.end_s,
            "input_tokens": round(usage.input_tokens),
            "cached_input_tokens": round(usage.cached_tokens),
            "output_tokens": round(usage.output_tokens),
            "worker_hours": usage.worker_hours,
            "idle_share": self.idle_share,
            "cost_usd": self.cost_usd,
            "income_usd": self.income_usd,
            "margin": self.margin,
            "priced_share": self.priced_share,
        }


def account(usages: Iterable[Usage], book: PriceBook) -> Account | None:
    """The sum of usages, each priced by what held at its time, cut where a price began. None for no usage."""
    pieces = [
        (usage.part((end - start) / max(1e-9, usage.end_s - usage.start_s), start, end), price)
        for usage in usages
        for start, end, price in book.pieces(usage.start_s, usage.end_s)
    ]
    if not pieces:
        return None
    total = _sum([usage for usage, _ in pieces])
    priced = [(usage, price) for usage, price in pieces if price is not None]
    if not priced:
        return Account(total, None, None, 0.0)
    cost = sum(usage.worker_hours * price.worker_hour for usage, price in priced)
    income = sum(price.income(u.input_tokens, u.cached_tokens, u.output_tokens) for u, price in priced)
    hours = sum(usage.worker_hours for usage, _ in priced)
    return Account(total, cost, income, hours / total.worker_hours if total.worker_hours > 0 else 1.0)


def by_hour(usages: Iterable[Usage], book: PriceBook) -> list[Account]:
    """Accounts of the full hours (UTC) in which the usages ended, oldest first."""
    hours: dict[float, list[Usage]] = defaultdict(list)
    for usage in usages:
        hours[(usage.end_s - 1e-6) // HOUR_S].append(usage)
    accounts = (account(hours[hour], book) for hour in sorted(hours))
    return [found for found in accounts if found is not None]


@cache
def day6() -> tuple[Account, tuple[Account, ...]]:
    """The published day: its total and its hours, through the same functions as this server's own."""
    book = PriceBook((_DAY6_PRICE,))
    usages = list(_day6_usages())
    total = account(usages, book)
    assert total is not None
    return total, tuple(by_hour(usages, book))


def _day6_usages() -> Iterable[Usage]:
    """The day's tokens spread over its hours by the published load curve; a worker is a GPU."""
    text = files("control_plane.console").joinpath("data/deepseek_day6_hourly.csv").read_text("utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    shares = [float(row["load_share"]) for row in rows]
    for i, row in enumerate(rows):
        share = shares[i] / sum(shares)
        start_s = _DAY6_START_S + i * HOUR_S
        computed, cached, output = (tokens * share for tokens in _DAY6_TOKENS)
        hours = float(row["mean_nodes"]) * _DAY6_GPUS_PER_NODE
        yield Usage(start_s, start_s + HOUR_S, computed, cached, output, hours)


def _sum(usages: Sequence[Usage]) -> Usage:
    busy = [usage.busy_s for usage in usages if usage.busy_s is not None]
    return Usage(
        min(usage.start_s for usage in usages),
        max(usage.end_s for usage in usages),
        sum(usage.input_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.output_tokens for usage in usages),
        sum(usage.worker_hours for usage in usages),
        sum(busy) if len(busy) == len(usages) else None,
    )
