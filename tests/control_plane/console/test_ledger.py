"""Money: the published day comes out as published, and a price holds when it was said to hold."""

from math import inf

import pytest

from control_plane.console.ledger import HOUR_S, Usage, account, by_hour, day6
from control_plane.console.prices import Price, PriceBook, PriceRevision, price_book
from runtime.config import EconomicsConfig, parse_config

NOON_S = 1_800_014_400.0  # a full hour


def economics(**fields: object) -> EconomicsConfig:
    return parse_config({"economics": fields}).economics


def hour(start_s: float = NOON_S, busy_s: float = 900.0) -> Usage:
    return Usage(start_s, start_s + HOUR_S, 3e6, 1e6, 2e6, 1.0, busy_s)


def flat(worker_hour: float, since_s: float = -inf) -> Price:
    return Price(since_s, 1, input=1.0, cached_input=0.5, output=2.0, worker_hour=worker_hour)


def test_the_published_day_comes_out_within_half_a_percent() -> None:
    total, hours = day6()
    assert total.cost_usd == pytest.approx(87_072, rel=0.005)
    assert total.income_usd == pytest.approx(562_027, rel=0.005)
    assert total.margin == pytest.approx(5.45, rel=0.005)
    assert total.usage.worker_hours / 24 / 8 == pytest.approx(226.75, rel=0.005)
    assert len(hours) == 24
    assert hours[0].usage.end_s - hours[0].usage.start_s == HOUR_S
    # By hour: what the table of the facts has for 22:00 (the peak) and 04:00 (the trough), in USD.
    assert hours[10].income_usd == pytest.approx(31_040, rel=0.005)
    assert hours[16].income_usd == pytest.approx(6_367, rel=0.005)
    assert hours[16].cost_usd == pytest.approx(1_088, rel=0.005)
    assert sum(h.income_usd or 0 for h in hours) == pytest.approx(total.income_usd)


def test_an_hour_at_one_price() -> None:
    found = account([hour()], PriceBook((flat(4.0),)))
    assert found is not None
    assert (found.cost_usd, found.income_usd) == (4.0, 3.0 + 0.5 + 4.0)
    assert found.margin == pytest.approx(0.875)
    assert (found.idle_share, found.priced_share) == (0.75, 1.0)


def test_a_price_that_begins_in_the_middle_splits_the_time() -> None:
    found = account([hour()], PriceBook((flat(4.0), flat(8.0, NOON_S + 900))))
    assert found is not None
    assert found.cost_usd == pytest.approx(0.25 * 4 + 0.75 * 8)


def test_what_had_no_price_counts_no_money_and_is_told() -> None:
    late = PriceBook((flat(4.0, NOON_S + 1800),))
    found = account([hour()], late)
    assert found is not None
    assert (found.cost_usd, found.income_usd, found.priced_share) == (2.0, 3.75, 0.5)
    assert found.usage.output_tokens == pytest.approx(2e6)
    before = account([hour(NOON_S - 7200)], late)
    assert before is not None
    assert (before.cost_usd, before.priced_share) == (None, 0.0)
    assert account([], late) is None


def test_hours_are_those_of_the_clock() -> None:
    usages = [Usage(NOON_S + 300 * i, NOON_S + 300 * (i + 1), 0, 0, 12, 1 / 12) for i in range(30)]
    found = by_hour(usages, PriceBook((flat(1.0),)))
    assert [row.usage.output_tokens for row in found] == [144, 144, 72]
    assert [row.cost_usd for row in found] == pytest.approx([1.0, 1.0, 0.5])


def test_a_price_holds_from_its_change_on_and_what_is_past_keeps_its_own() -> None:
    book = price_book(
        [
            PriceRevision(1, NOON_S - 9000, economics(worker_price=2)),
            PriceRevision(2, NOON_S - 100, economics(worker_price=2)),  # about something else
            PriceRevision(3, NOON_S, economics(worker_price=3)),
        ]
    )
    assert [(e.since_s, e.revision) for e in book.entries] == [(-inf, 1), (NOON_S, 3)]
    assert [p.worker_hour for t in (0.0, NOON_S - 1, NOON_S) if (p := book.at(t))] == [2, 2, 3]


def test_a_date_is_of_the_change_that_sets_it() -> None:
    dated = "2027-01-15T14:00:00Z"  # two hours later
    book = price_book(
        [
            PriceRevision(1, NOON_S - 9000, economics(worker_price=2)),
            PriceRevision(2, NOON_S, economics(worker_price=3, effective_from=dated)),
            PriceRevision(3, NOON_S + 9000, economics(worker_price=5, effective_from=dated)),
        ]
    )
    times = (NOON_S + 1, NOON_S + 7199, NOON_S + 7200, NOON_S + 8999, NOON_S + 9000)
    assert [p.worker_hour for t in times if (p := book.at(t))] == [2, 2, 3, 3, 5]
    assert [p.worker_hour for p in book.between(NOON_S, inf)] == [2, 3, 5]
    assert [(a - NOON_S, b - NOON_S) for a, b, _ in book.pieces(NOON_S, NOON_S + 8000)] == [
        (0, 7200),
        (7200, 8000),
    ]


def test_later_decisions_win_over_a_date_that_comes() -> None:
    book = price_book(
        [
            PriceRevision(1, NOON_S, economics(worker_price=2)),
            PriceRevision(2, NOON_S + 1, economics(worker_price=3, effective_from="2027-01-15T14:00:00Z")),
            PriceRevision(3, NOON_S + 2, economics(worker_price=4)),
        ]
    )
    assert [p.worker_hour for t in (NOON_S + 1, NOON_S + 2, NOON_S + 9999) if (p := book.at(t))] == [2, 4, 4]


def test_no_price_is_none_and_a_price_of_nothing_too() -> None:
    assert PriceBook(()).at(NOON_S) is None
    assert price_book([PriceRevision(1, NOON_S, economics())]).at(NOON_S) is None


@pytest.mark.parametrize(
    "text", ["2026-12-01", "2026-12-01T00:00:00", "1999-12-31T00:00:00Z", "soon", "9e9", 5, None]
)
def test_a_date_without_its_zone_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"economics.effective_from.*(zone|type)"):
        economics(effective_from=text)


def test_dates_are_kept_in_utc() -> None:
    assert economics(effective_from="2026-12-01T08:30:00+08:00").effective_from == "2026-12-01T00:30:00Z"
