"""Overview: how the server is, in one look: promises, alerts, latency, traffic, what changed lately."""

import streamlit as st

from control_plane.console_schemas import Alert, OverviewPage, RecentChange, Span
from ui import session
from ui.charts import lines
from ui.fields import shown
from ui.frame import figures, link_to, live_page, look, plots, table
from ui.plain import plain
from ui.units import age, clock, count, percent, seconds

BOXES = {"critical": st.error, "warning": st.warning, "info": st.info}
ICONS = {"critical": ":material/error:", "warning": ":material/warning:", "info": ":material/info:"}
QUANTILES = ("p50", "p90", "p99")
LEAST_ATTAINMENT = 0.95  # below it the tile is marked
SPAN_WORDS = {"15min": "last 15 min", "3h": "last 3 h", "24h": "last 24 h"}


def draw(page: OverviewPage, span: Span) -> None:
    _alerts(page.alerts, page.server_time)
    _numbers(page, span)
    _latency(page, span)
    st.subheader("What changed lately", anchor=False)
    rows = [_change(change) for change in page.recent_changes[:5]]
    table(rows, "changes", "Nothing was changed since the server started.")
    _traffic(page, span)


def _alerts(alerts: list[Alert], now: float) -> None:
    if not alerts:
        st.success("Nothing needs attention.", icon=":material/check_circle:")
    for alert in alerts[:6]:
        text, link = st.columns([6, 1], vertical_alignment="center")
        with text:
            BOXES[alert.severity](
                f"**{plain(alert.text)}** · for {age(now - alert.since)}", icon=ICONS[alert.severity]
            )
        if alert.page != "overview":
            with link:
                link_to(alert.page)
    if len(alerts) > 6:
        st.caption(f"and {len(alerts) - 6} more")


def _numbers(page: OverviewPage, span: Span) -> None:
    now, promises = page.now, page.promises
    percentiles = {found.name: found for found in page.percentiles}
    if now is None or promises is None:
        return
    when = SPAN_WORDS[span]
    ttft, itl = percentiles.get("ttft"), percentiles.get("itl")
    ttft_s, itl_s = (found.p99_s if found else None for found in (ttft, itl))
    kept, ttft_label, itl_label = "Promises kept", "TTFT p99", "ITL p99"
    broken = [
        label
        for label, is_broken in (
            (kept, promises.attainment is not None and promises.attainment < LEAST_ATTAINMENT),
            (ttft_label, ttft_s is not None and ttft_s > promises.ttft_s),
            (itl_label, itl_s is not None and itl_s > promises.itl_s),
        )
        if is_broken
    ]
    figures(
        (
            kept,
            percent(promises.attainment),
            f"{promises.num_kept:,} of {promises.num_requests:,} requests, {when}; missed: TTFT "
            f"{promises.num_ttft_missed:,}, ITL {promises.num_itl_missed:,}",
        ),
        ("Goodput", f"{count(promises.goodput_s)} /s", f"requests that kept both, {when}"),
        (ttft_label, seconds(ttft_s), f"promised {seconds(promises.ttft_s)}, {when}"),
        (itl_label, seconds(itl_s), f"promised {seconds(promises.itl_s)}, {when}"),
        (
            "Running · waiting",
            f"{now.num_running} · {now.num_waiting}",
            f"now; batch size {now.batch_size}, {now.waiting_tokens:,} tokens wait",
        ),
        (
            "Output tokens",
            f"{count(now.generation_tokens_s)} /s",
            f"last 10 s; prompts {count(now.prompt_tokens_s)} /s",
        ),
        bad=broken,
    )
    late = (
        f"**{now.late_compiles} late compiles**: always a fault" if now.late_compiles else "no late compile"
    )
    st.caption(
        f"Up {age(now.uptime_s)} · device busy {percent(now.busy_share)} · KV pages {percent(now.kv_use)} in use · "
        f"{now.num_rungs_ready} of {now.num_rungs} rungs ready · {late} · {now.num_preemptions} preemptions"
    )


def _latency(page: OverviewPage, span: Span) -> None:
    seen, promises = look(span), page.promises
    ttft = (1000 * promises.ttft_s, "promised") if promises else None
    itl = (1000 * promises.itl_s, "promised") if promises else None
    by_ttft = {f"ttft_{q}": q for q in QUANTILES}
    by_itl = {f"itl_{q}": q for q in QUANTILES}
    plots(
        2,
        ttft=lines(page, seen, "Time to first token", "ms", by_ttft, promise=ttft, least_top=100),
        itl=lines(page, seen, "Time between tokens", "ms", by_itl, promise=itl, least_top=10),
    )


def _traffic(page: OverviewPage, span: Span) -> None:
    seen = look(span)
    in_engine = {"running": "running", "waiting": "waiting"}
    tokens = {"generation_tokens": "output", "prompt_tokens": "prompts"}
    used = {"busy_share": "device busy", "kv_use": "KV pages in use"}
    requests = {"requests": "ended", "goodput": "kept both promises", "rejections": "rejected"}
    times = {"queue_p99": "p99 in the queue", "e2e_p99": "p99 from end to end"}
    plots(
        2,
        kept=lines(page, seen, "Promises kept", "%", {"slo_attainment": "kept"}, least_top=100, top=105),
        queue=lines(
            page, seen, "Requests in the engine", "requests", in_engine, least_top=10, is_filled=True
        ),
        tokens=lines(page, seen, "Tokens", "tokens/s", tokens, least_top=100),
        use=lines(page, seen, "What is used", "%", used, least_top=100, top=105),
        requests=lines(page, seen, "Requests", "1/s", requests, least_top=1),
        times=lines(page, seen, "Queue and whole request", "ms", times, least_top=1000),
    )


def _change(change: RecentChange) -> dict[str, str]:
    changed = ", ".join(
        f"{c.get('path')}: {shown(c.get('old'))} → {shown(c.get('new'))}" for c in change.changes
    )
    return {
        "when": clock(change.time, session.zone()),
        "who": change.actor,
        "what": change.event,
        "result": change.result,
        "revision": "" if change.revision is None else str(change.revision),
        "why": change.reason,
        "changed": changed,
    }


live_page("overview", "Overview", draw)
