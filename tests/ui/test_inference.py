"""The playground's stream: text as it comes, errors in words, never a silent end."""

from collections.abc import Iterator

import httpx
import pytest

from ui.inference import Event, InferenceError, models, new_request_id, stream


def answering(status: int, body: str) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status, text=body)))


def events(body: str, status: int = 200) -> Iterator[Event]:
    return stream(answering(status, body), "http://server", "", "/v1/completions", {}, new_request_id())


def test_text_reason_and_usage() -> None:
    body = (
        ': keep-alive\n\ndata: {"choices":[{"text":"A"}]}\n\n'
        'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
        'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    found = list(events(body))
    assert [event.text for event in found] == ["A", "b", ""]
    assert (found[1].finish_reason, found[2].usage) == ("stop", {"completion_tokens": 2})
    assert found[0].offset_s >= 0


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ('data: {"choices":[{"text":"A"}]}\n\n', 200, "cut off"),
        ('data: {"error":{"message":"engine stopped"}}\n\ndata: [DONE]\n\n', 200, "engine stopped"),
        ("data: nonsense\n\n", 200, "no JSON"),
        ("data: [1]\n\n", 200, "not understood"),
        ('{"error":{"message":"too long"}}', 400, "400: too long"),
        ('{"error":{"message":"no key"}}', 401, "Enter an API key"),
        ("<html>", 502, "502"),
    ],
)
def test_what_goes_wrong_is_told(body: str, status: int, told: str) -> None:
    with pytest.raises(InferenceError, match=told):
        list(events(body, status))


def test_the_key_goes_into_the_header_only() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    assert models(httpx.Client(transport=httpx.MockTransport(answer)), "http://server", "k3y") == ["m"]
    assert seen[0].headers["authorization"] == "Bearer k3y"
    assert "k3y" not in str(seen[0].url)


def test_a_server_that_is_not_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(InferenceError, match="cannot be reached"):
        models(httpx.Client(transport=httpx.MockTransport(refuse)), "http://server", "")
