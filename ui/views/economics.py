"""Economics: what the hours cost, what the tokens would bring at the prices in force, what a million tokens cost."""

from typing import Any

import streamlit as st

from control_plane.console_schemas import EconomicsPage, Ledger, Price, Span
from ui import session
from ui.charts import lines
from ui.frame import figures, link_to, live_page, look, mode, plots, table
from ui.money import hourly, phase_cost, tokens_by_hour
from ui.plain import plain
from ui.units import DASH, clock, count, money, percent


def draw(page: EconomicsPage, span: Span) -> None:
    st.subheader("This server, last 24 hours", anchor=False)
    if not page.ledger.available:
        st.info(
            f"**Money** is not available: {plain(page.ledger.reason)}  \nPrices are live configuration, section "
            "`economics`: they hold from their date on, and the past keeps its own.",
            icon=":material/info:",
        )
        link_to("tuning")
    _ledger(page.ledger, "own")
    if page.prices:
        st.markdown("**Prices** (USD; section `economics` of the configuration)")
        table([_price(price) for price in page.prices], "prices", "")
    seen, idle = look(span), {"idle_share": "idle"}
    money_lines = {"cost": "cost", "income": "theoretical income"}
    plots(
        2,
        running=lines(page, seen, "Cost and theoretical income", "USD/h", money_lines, least_top=0.1),
        idle=lines(page, seen, "Idle share of the device", "%", idle, least_top=100, top=105),
    )
    with st.expander(f"Example, not this server: {plain(page.example.label)}"):
        st.caption(
            f"{plain(page.example.source)} Computed by the same function as the ledger above; income is theoretical."
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
        ("Margin", percent(total.margin) if total.margin is not None else DASH, "(income - cost) / cost"),
        (
            "Tokens out · in",
            f"{count(total.output_tokens)} · {count(total.input_tokens)}",
            f"and {total.cached_input_tokens:,} input tokens from the cache",
        ),
        ("Idle", percent(total.idle_share), "share of the worker-hours in which the device did nothing"),
    )
    drawn = {
        f"hours_{key}": hourly(ledger.hours, zone, mode(), "Cost and theoretical income by hour"),
        f"tokens_{key}": tokens_by_hour(ledger.hours, zone, mode()),
    }
    if any(p.usd_per_million_busy is not None for p in ledger.phases):
        drawn[f"phases_{key}"] = phase_cost(ledger.phases, mode())
    if ledger.hours:
        plots(2 if len(drawn) == 2 else 3, **drawn)


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
