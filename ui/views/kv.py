"""KV levels: how full each level is, what is found again, what moves between levels."""

from collections.abc import Callable

import streamlit as st

from control_plane.console_schemas import KvLevel, KvPage, Span
from ui.charts import gauge_band, lines
from ui.frame import figures, live_page, look, plots
from ui.plain import plain
from ui.units import DASH, count, num_bytes, percent


def draw(page: KvPage, span: Span) -> None:
    first = next((level for level in page.levels if level.level == "L1" and level.available), None)
    found_share = page.found_tokens / page.looked_up_tokens if page.looked_up_tokens else None
    figures(
        (
            "Pages in use",
            f"{first.used_pages:,} of {first.num_pages:,}" if first and first.num_pages else DASH,
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
    seen = look(span)
    capacity = (float(first.num_pages), "all pages") if first and first.num_pages else None
    in_use, kept = "Pages in use", "Pages kept for reuse"
    found, spared = "Prefix tokens found of those looked up", "Prompt tokens not computed again"
    plots(
        2,
        used=gauge_band(page, seen, in_use, "pages", "used_pages", least_top=10, capacity=capacity),
        cached=gauge_band(page, seen, kept, "pages", "cached_pages", least_top=10, capacity=capacity),
        found=lines(page, seen, found, "%", {"hit_share": "found"}, least_top=100, top=105),
        spared=lines(page, seen, spared, "tokens/s", {"cached_tokens": "tokens"}, least_top=10),
    )


def _level(level: KvLevel) -> None:
    st.markdown(f"**{level.level}** · {level.place}")
    if not level.available:
        st.caption(f"Not available: {plain(level.reason or 'the server gives no reason')}")
        return
    if level.capacity_bytes and level.used_bytes is not None:
        used = level.used_bytes / level.capacity_bytes
        text = f"{num_bytes(level.used_bytes)} of {num_bytes(level.capacity_bytes)} in use"
        st.progress(min(1.0, max(0.0, used)), text=text)
    facts = {
        "found": percent(level.hit_share) if level.hit_share is not None else "",
        "promoted": _rate(count, level.promotions_s),
        "evicted": _rate(count, level.evictions_s),
        "read": _rate(num_bytes, level.read_bytes_s),
        "written": _rate(num_bytes, level.written_bytes_s),
    }
    told = " · ".join(f"{name} {value}" for name, value in facts.items() if value)
    untold = ", ".join(name for name, value in facts.items() if not value)
    st.markdown(told or "nothing is told of it")
    if untold:
        st.caption(f"the server does not say: {untold}")


def _rate(write: Callable[[float | None], str], value: float | None) -> str:
    return "" if value is None else f"{write(value)}/s"


live_page("kv", "KV levels", draw, "Keys and values in pages: who holds them, what is found again.")
