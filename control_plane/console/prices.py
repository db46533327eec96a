"""PriceBook: which price held when. Built from the revisions of the configuration, so no price is stored twice. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import inf

from runtime.config import EconomicsConfig

PER_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Price:
    """USD a million tokens, and an hour of a worker. since_s: Unix, -inf: always. revision: what brought it in."""

    since_s: float
    revision: int | None
    input: float
    cached_input: float
    output: float
    worker_hour: float

    @property
    def is_set(self) -> bool:
        return bool(self.input or self.cached_input or self.output or self.worker_hour)

    def income(self, input_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        usd = input_tokens * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        return usd / PER_MILLION


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Entries in the order in which they were decided. Where two cover a time the later decision wins."""

    entries: tuple[Price, ...]

    def at(self, time_s: float) -> Price | None:
        """What holds at `time_s`; None before the first entry or where no price is set."""
        found = next((e for e in reversed(self.entries) if e.since_s <= time_s), None)
        return found if found is not None and found.is_set else None

    def pieces(self, start_s: float, end_s: float) -> list[tuple[float, float, Price | None]]:
        """[start_s, end_s) cut where a price begins: (start, end, price)."""
        cuts = sorted({e.since_s for e in self.entries if start_s < e.since_s < end_s})
        edges = [start_s, *cuts, end_s]
        return [(a, b, self.at(a)) for a, b in pairwise(edges)]

    def between(self, start_s: float, end_s: float) -> list[Price]:
        """The prices that hold somewhere in the time, by their beginning, each once."""
        times = [start_s, *(e.since_s for e in self.entries if start_s < e.since_s < end_s)]
        found: dict[int, Price] = {}
        for time_s in sorted(times):
            if (price := self.at(time_s)) is not None:
                found.setdefault(id(price), price)
        return list(found.values())


NO_PRICES = PriceBook(())


@dataclass(frozen=True, slots=True)
class PriceRevision:
    """A revision as far as prices go. time_s: Unix, when it was made."""

    number: int
    time_s: float
    economics: EconomicsConfig


def price_book(revisions: Sequence[PriceRevision]) -> PriceBook:
    """From the kept revisions, oldest first.

    A price holds from the time of its revision, or from the `effective_from` that the same revision sets: a date that
    an earlier revision set says nothing about a later change. The first one that is kept holds always, or from its date.
    """
    return PriceBook(tuple(_entries(revisions)))


def _entries(revisions: Sequence[PriceRevision]) -> Iterable[Price]:
    before: EconomicsConfig | None = None
    for revision in revisions:
        now = revision.economics
        if now == before:
            continue
        has_new_date = before is None or now.effective_from != before.effective_from
        if now.effective_from and has_new_date:
            since_s = datetime.fromisoformat(now.effective_from).timestamp()
        else:
            since_s = -inf if before is None else revision.time_s
        before = now
        yield Price(
            since_s,
            revision.number,
            now.input_price,
            now.cached_input_price,
            now.output_price,
            now.worker_price,
        )
