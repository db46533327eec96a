"""KV levels: how full each level is, what is found again, what moves between levels."""

from typing import Any

import streamlit as st

from control_plane.console_schemas import KvLevel, KvPage, Span
from ui import session
from ui.charts import gauge_band, lines
from ui.frame import figures, live_page, mode, plots
from ui.units import count, num_bytes, percent

NAMES = {"L1": "L1 · device", "L2": "L2 · host", "L3": "L3 · shared store"}


def draw(page: KvPage, span: Span) -> None:
    first = next((level for level in page.levels if level.level == "L1" and level.available), None)
    found_share = page.found_tokens / page.looked_up_tokens if page.looked_up_tokens else None
    figures(
        (
            "Pages in use",
            f"{first.used_pages:,} of {first.num_pages:,}" if first and first.num_pages else "–",  # noqa: RUF001
            f"by running requests; a page is {page.page_size} tokens, {num_bytes(page.page_bytes)}",
        ),
        (
            "Kept for reuse",
            count(first.cached_pages if first else None),
            "pages of a prefix that may come again; free when they are needed",
        ),
        (
            "Prefix tokens found",
            percent(found_share),
            f"{page.found_tokens:,} of {page.looked_up_tokens:,} tokens looked up",
        ),
        (
            "Preemptions",
            count(page.num_preemptions_span),
            "requests that lost their pages and start again; should stay 0",
        ),
        ("Prefix cache", "on" if page.prefix_cache_enabled else "off", "kv_cache.enable_prefix_cache"),
    )
    st.subheader("Levels", anchor=False)
    for place, level in zip(st.columns(len(page.levels) or 1), page.levels, strict=False):
        with place, st.container(border=True):
            _level(level)
    common: dict[str, Any] = {"span": span, "zone": session.zone(), "mode": mode()}
    capacity = (float(first.num_pages), "all pages") if first and first.num_pages else None
    plots(
        2,
        (
            gauge_band(page, "used_pages", title="Pages in use", unit="pages", least_top=10, capacity=capacity, **common),
            "used", "KV pages in use over time",
        ),
        (
            gauge_band(page, "cached_pages", title="Pages kept for reuse", unit="pages", least_top=10, capacity=capacity, **common),
            "cached", "KV pages kept for prefixes over time",
        ),
        (
            lines(page, [("hit_share", "found")], title="Prefix tokens found of those looked up", unit="%", least_top=100, top=105, **common),
            "hit", "Share of looked-up prefix tokens that were found",
        ),
        (
            lines(page, [("cached_tokens", "tokens")], title="Prompt tokens that were not computed again", unit="tokens/s", least_top=10, **common),
            "spared", "Prompt tokens taken from the prefix cache a second",
        ),
    )  # fmt: skip


def _level(level: KvLevel) -> None:
    st.markdown(f"**{NAMES[level.level]}** — {level.place}")
    if not level.available:
        st.caption(f"Not available: {level.reason or 'the server gives no reason'}")
        return
    used = level.used_bytes / level.capacity_bytes if level.capacity_bytes and level.used_bytes is not None else None
    if used is not None:
        st.progress(min(1.0, max(0.0, used)), text=f"{num_bytes(level.used_bytes)} of {num_bytes(level.capacity_bytes)} in use")  # fmt: skip
    st.markdown(
        f"found {percent(level.hit_share)} · promoted {_rate(level.promotions_s)} · evicted {_rate(level.evictions_s)}  \n"
        f"read {num_bytes(level.read_bytes_s)}/s · written {num_bytes(level.written_bytes_s)}/s"
    )


def _rate(value: float | None) -> str:
    return f"{count(value)} /s"


live_page("kv", "KV levels", draw, "Keys and values in pages: who holds them, what is found again.")
