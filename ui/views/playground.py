"""Playground: send a prompt, watch the tokens come, then see this one request's way through the engine."""

import time
from collections.abc import Iterator
from typing import Any

import streamlit as st

from control_plane.client import AdminError
from control_plane.request_schemas import RequestTimeline
from ui import session
from ui.frame import figures, mode, plot, plots, why_not
from ui.inference import Event, InferenceError, models, new_request_id, stream
from ui.maps import request_way, token_arrivals, words
from ui.plain import plain
from ui.units import DASH, count, seconds

START = "It is a truth universally acknowledged"
WAIT_FOR_TIMELINE_S = 2.0


def page() -> None:
    st.title("Playground", anchor=False)
    st.caption("One real request to the server's own endpoint, counted like any other.")
    _api_key()
    try:
        names = models(session.http(), session.server(), session.api_key())
    except InferenceError as error:
        st.error(plain(error), icon=":material/warning:")
        st.button("Try again", key="again")
        return
    asked = _form(names)
    if asked is not None:
        _run(*asked)
    elif (last := st.session_state.get("played")) is not None:
        st.markdown(f"> {last['text']}")
    if (last := st.session_state.get("played")) is not None:
        _show(last)


def _api_key() -> None:
    label = "API key: set" if session.api_key() else "API key: none"
    with (
        st.expander(label, icon=":material/key:"),
        st.form("api_key_form", clear_on_submit=True, border=False),
    ):
        entered = st.text_input(
            "Key for /v1", type="password", autocomplete="off", max_chars=session.MAX_KEY_CHARS
        )
        if st.form_submit_button("Use this key"):
            try:
                session.enter_key(entered, "api_key")
            except ValueError as error:
                st.error(str(error))
            else:
                st.rerun()


def _form(names: list[str]) -> tuple[str, dict[str, Any]] | None:
    """The path and body of the request when the form is sent."""
    with st.form("prompt_form"):
        prompt = st.text_area("Prompt", START, key="prompt", max_chars=100_000, height=110)
        first, second, third, fourth = st.columns(4)
        model = first.selectbox("Model", names, key="model")
        kind = second.selectbox("Kind", ["completion", "chat"], key="kind")
        max_tokens = third.number_input("Most tokens", 1, 4096, 120, key="max_tokens")
        temperature = fourth.number_input("Temperature", 0.0, 2.0, 0.7, 0.1, key="temperature")
        if not st.form_submit_button("Send", type="primary"):
            return None
    if not prompt.strip():
        st.error("Write a prompt first.")
        return None
    body: dict[str, Any] = {"model": model, "max_tokens": int(max_tokens), "temperature": float(temperature)}
    if kind == "chat":
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", body | {"prompt": prompt}


def _run(path: str, body: dict[str, Any]) -> None:
    """Streams into the page. Leaving the page, or Stop, closes the stream, and the server stops the request."""
    st.session_state.pop("played", None)
    request_id, events = new_request_id(), []
    stop = st.empty()
    stop.button("Stop", key="stop")
    try:
        st.write_stream(_texts(path, body, request_id, events))
    except InferenceError as error:
        st.error(plain(error), icon=":material/warning:")
    stop.empty()
    if events:
        st.session_state["played"] = {
            "id": request_id,
            "text": plain("".join(event.text for event in events)).replace("\n", "\n> "),
            "offsets": [event.offset_s for event in events if event.text],
            "finish": next((e.finish_reason for e in reversed(events) if e.finish_reason), None),
            "usage": next((e.usage for e in reversed(events) if e.usage), None),
        }


def _texts(path: str, body: dict[str, Any], request_id: str, events: list[Event]) -> Iterator[str]:
    for event in stream(session.http(), session.server(), session.api_key(), path, body, request_id):
        events.append(event)
        if event.text:
            yield plain(event.text)


def _show(last: dict[str, Any]) -> None:
    usage, offsets = last["usage"] or {}, last["offsets"]
    tokens = usage.get("completion_tokens")
    first_s = offsets[0] if offsets else None
    rest_s = offsets[-1] - offsets[0] if len(offsets) > 1 else None
    figures(
        ("First text after", seconds(first_s), "as this console saw it, network included"),
        (
            "Tokens a second",
            count((tokens - 1) / rest_s if tokens and tokens > 1 and rest_s else None),
            "after the first text",
        ),
        (
            "Prompt · output",
            f"{usage.get('prompt_tokens', DASH)} · {tokens if tokens is not None else DASH}",
            "tokens",
        ),
        ("Ended by", last["finish"] or DASH, "stop, length, ..."),
    )
    timeline = _timeline(last["id"])
    if timeline is None:
        plot(token_arrivals(offsets, None, mode()), "gaps")
        return
    plots(2, way=request_way(timeline, mode()), gaps=token_arrivals(offsets, None, mode()))
    launches = ", ".join(f"{rung} x {num}" for rung, num in timeline.rungs.items())
    st.markdown(
        f"In the queue **{seconds(timeline.queue_s)}** · prefill **{seconds(timeline.prefill_s)}** · first token after "
        f"**{seconds(timeline.ttft_s)}** · decode **{seconds(timeline.decode_s)}** · in all **{seconds(timeline.e2e_s)}** · "
        f"{timeline.cached_tokens} of {timeline.prompt_tokens} prompt tokens from the prefix cache · "
        f"{timeline.num_preemptions} preemptions  \nLaunches: {launches or 'none'}"
    )
    with st.expander("Every event"):
        st.dataframe(
            [
                {
                    "after": seconds(e.offset_s),
                    "what": words(e.kind),
                    "rung": e.rung,
                    "took": seconds(e.duration_s) if e.duration_s else "",
                    "tokens": e.tokens or None,
                    "launches": e.launches or None,
                    "detail": e.detail,
                }
                for e in timeline.events
            ],
            hide_index=True,
            key="events",
        )
        if timeline.num_dropped:
            st.caption(f"{timeline.num_dropped} events did not fit.")


def _timeline(request_id: str) -> RequestTimeline | None:
    """The server's own record of the request: there a moment after the stream's end."""
    end = time.monotonic() + WAIT_FOR_TIMELINE_S
    while True:
        try:
            found = session.client().request(request_id)
            if found and (found[0].state == "finished" or time.monotonic() > end):
                return found[0]
        except AdminError as error:
            if error.status != 404 or time.monotonic() > end:
                st.info(f"The request's timeline is not available: {why_not(error)}", icon=":material/info:")
                return None
        time.sleep(0.1)


page()
