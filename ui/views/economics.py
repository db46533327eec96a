"""Economics: what the hours cost, what the tokens would bring at the prices in force, what a million tokens cost."""

from typing import Any

import streamlit as st

from control_plane.console_schemas import EconomicsPage, Ledger, Price, Span
from ui import session
from ui.charts import lines
from ui.frame import figures, live_page, mode, plots, table
from ui.money import hourly, phase_cost, tokens_by_hour
from ui.units import clock, count, money, percent


def draw(page: EconomicsPage, span: Span) -> None:
    st.subheader("This server, last 24 hours", anchor=False)
    if not page.ledger.available:
        st.info(
            f"**Money** is not available: {page.ledger.reason}  \nSet the section `economics` under "
            "[Tuning](tuning): prices hold from their date on, the past keeps its own.",
            icon="ℹ️",  # noqa: RUF001
        )
    _ledger(page.ledger, "own")
    if page.prices:
        st.markdown("**Prices** (USD; a change is made under [Tuning](tuning))")
        table([_price(price) for price in page.prices], "prices", "")
    zone = session.zone()
    common: dict[str, Any] = {"span": span, "zone": zone, "mode": mode()}
    plots(
        2,
        (
            lines(page, [("cost", "cost"), ("income", "theoretical income")], title="Cost and theoretical income, running", unit="USD/h", least_top=0.1, **common),
            "running", "Cost and income an hour over time",
        ),
        (
            lines(page, [("idle_share", "idle")], title="Idle share of the device", unit="%", least_top=100, top=105, **common),
            "idle", "Idle share over time",
        ),
    )  # fmt: skip
    with st.expander(f"Example, not this server: {page.example.label}"):
        st.caption(
            f"{page.example.source} Computed by the same function as the ledger above; income is theoretical."
        )
        _ledger(page.example, "example")


def _ledger(ledger: Ledger, key: str) -> None:
    total, zone = ledger.total, session.zone()
    if total is None:
        st.caption("No token was counted yet.")
        return
    figures(
        ("Cost", money(total.cost_usd), f"{total.worker_hours:,.2f} worker-hours at the price of their time"),
        ("Theoretical income", money(total.income_usd), "every token at the price of its hour"),
        ("Margin", percent(total.margin) if total.margin is not None else "–", "(income - cost) / cost"),  # noqa: RUF001
        (
            "Tokens out · in",
            f"{count(total.output_tokens)} · {count(total.input_tokens)}",
            f"and {total.cached_input_tokens:,} input tokens from the cache",
        ),
        ("Idle", percent(total.idle_share), "share of the worker-hours in which the device did nothing"),
    )
    drawn = [
        (hourly(ledger.hours, zone, mode(), "Cost and theoretical income by hour"), f"hours_{key}", "Cost and income by hour"),
        (tokens_by_hour(ledger.hours, zone, mode()), f"tokens_{key}", "Tokens by hour"),
    ]  # fmt: skip
    if any(p.usd_per_million_busy is not None for p in ledger.phases):
        drawn.append(
            (phase_cost(ledger.phases, mode()), f"phases_{key}", "USD a million tokens cost by phase")
        )
    if ledger.hours:
        plots(len(drawn), *drawn)


def _price(price: Price) -> dict[str, Any]:
    return {
        "in force from": "always" if price.since is None else clock(price.since, session.zone()),
        "input, per M": price.input,
        "cached input, per M": price.cached_input,
        "output, per M": price.output,
        "worker-hour": price.worker_hour,
        "revision": "file" if price.revision is None else str(price.revision),
    }


live_page("economics", "Economics", draw)
