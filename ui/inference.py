"""One streamed completion from /v1, event by event, with the times of their coming. No Streamlit.

Closing the generator closes the connection, and the server stops the request.
"""

import json
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

MAX_EVENT_CHARS = 1 << 20
MAX_EVENTS = 100_000


class InferenceError(Exception):
    """The server refused, or the stream broke. The message is for the person who asked."""


@dataclass(frozen=True, slots=True)
class Event:
    """What came with one event of the stream, `offset_s` after the request was sent."""

    text: str
    offset_s: float
    finish_reason: str | None = None
    usage: dict[str, int] | None = None


def new_request_id() -> str:
    """Names the call, so that its timeline can be asked for."""
    return f"console-{uuid.uuid4().hex[:16]}"


def models(http: httpx.Client, server: str, key: str) -> list[str]:
    """Names that the server takes. Raises InferenceError."""
    try:
        answer = http.get(f"{server}/v1/models", headers=_headers(key))
    except httpx.HTTPError as error:
        raise InferenceError(f"The server cannot be reached: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise InferenceError(_refusal(answer.status_code, answer.text))
    try:
        return [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise InferenceError("The server's list of models is not understood.") from None


def stream(
    http: httpx.Client, server: str, key: str, path: str, body: dict[str, Any], request_id: str
) -> Iterator[Event]:
    """Events of POST {server}{path} until the stream's end. path: /v1/completions or /v1/chat/completions.

    Raises InferenceError when it is refused, breaks, or sends an error.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    start = time.monotonic()
    headers = _headers(key) | {"X-Request-Id": request_id}
    try:
        with http.stream("POST", f"{server}{path}", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise InferenceError(_refusal(answer.status_code, answer.read().decode("utf-8", "replace")))
            with closing(_payloads(answer)) as payloads:
                for payload in payloads:
                    yield _event(payload, time.monotonic() - start)
    except httpx.TimeoutException:
        raise InferenceError("Nothing came for too long; the request was given up.") from None
    except httpx.HTTPError as error:
        raise InferenceError(f"The stream broke: {type(error).__name__}") from None


def _payloads(answer: httpx.Response) -> Generator[dict[str, Any]]:
    """JSON of the `data:` lines up to [DONE]. A stream without it was cut off."""
    num_events = 0
    for line in answer.iter_lines():
        if len(line) > MAX_EVENT_CHARS or num_events > MAX_EVENTS:
            raise InferenceError("The stream has more than a console takes.")
        if not line.startswith("data:"):
            continue  # an empty line, or a comment that keeps the connection open
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        num_events += 1
        try:
            payload = json.loads(data)
        except ValueError:
            raise InferenceError("The stream is no JSON.") from None
        if not isinstance(payload, dict):
            raise InferenceError("The stream is not understood.")
        if (error := payload.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            raise InferenceError(f"The server ended the stream: {str(message)[:500]}")
        yield payload
    raise InferenceError("The stream was cut off before its end.")


def _event(payload: dict[str, Any], offset_s: float) -> Event:
    choices = payload.get("choices") or [{}]
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return Event(str(text), offset_s, choice.get("finish_reason"), payload.get("usage"))


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _refusal(status: int, text: str) -> str:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    hint = " Enter an API key below." if status in (401, 403) else ""
    return f"The server answered {status}: {str(message)[:500]}{hint}"
