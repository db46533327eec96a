"""Wrong bodies: always a 4xx in OpenAI's shape, small, without the input in it."""

import httpx
import orjson
import pytest

from control_plane.errors import clean, validation_fault

HEAD = {"Content-Type": "application/json"}
GOOD = b'{"model":"fake","prompt":"a","temperature":%s}'


@pytest.mark.parametrize(
    "body",
    [
        GOOD % b"NaN",
        GOOD % b"Infinity",
        GOOD % b"-Infinity",
        GOOD % b"1e999",
        GOOD % b'"1"',
        GOOD % b"true",
        GOOD % b"[]",
        GOOD % (b"9" * 5000),
        b"",
        b"null",
        b"[1]",
        b'"text"',
        b"{",
        b'{"model":"fake","prompt":"\\ud800"}',
        b'{"model":"fake","prompt":"a","\\ud800":1,"n":"x"}',
        b'{"model":"fake","prompt":"a","user":7}',
        b'{"model":"fake","prompt":"a","stop":{"a":1}}',
        b'{"model":"fake","prompt":"a","logit_bias":{"1":NaN}}',
        b'{"model":"fake","prompt":"a","n":1e9}',
        b'{"model":"fake","prompt":"a","max_tokens":99999999999999999999999}',
        b'{"model":"fake","prompt":{"a":1}}',
        b'{"prompt":"a"}',
        b'{"model":null,"prompt":"a"}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"model":"fake","prompt":' + b"[" * 60_000 + b"]" * 60_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_wrong_bodies_are_400(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await client.post(path, content=body, headers=HEAD)
    if path == "/tokenize" and answer.status_code == 200:  # what is wrong there is an unknown field here
        return
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) < 4096


async def test_content_type_must_be_json(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", content=GOOD % b"1", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400


async def test_a_large_wrong_body_gives_a_small_error(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": [{"role": 1, "content": "secret" * 50, "x": "y" * 900}] * 400}
    answer = await client.post("/v1/chat/completions", json=body | {f"k{i}" * 200: 1 for i in range(50)})
    assert answer.status_code == 400
    assert len(answer.content) < 3000
    assert b"secret" not in answer.content


async def test_unknown_route_and_method(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = await client.put("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"


async def test_timeout_header_is_checked(client: httpx.AsyncClient) -> None:
    for value in ("0", "-5", "abc", "1e9", "99999999999"):
        answer = await client.post(
            "/v1/completions", json={"model": "fake", "prompt": "a"}, headers={"X-Request-Timeout-Ms": value}
        )
        assert answer.status_code == 400


async def test_request_id_is_echoed_when_safe(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version", headers={"X-Request-Id": "a-1"})).headers["x-request-id"] == "a-1"
    for unsafe in ("a b", "x" * 200, "<i>"):
        echoed = (await client.get("/version", headers={"X-Request-Id": unsafe})).headers["x-request-id"]
        assert echoed != unsafe


def test_text_is_cleaned() -> None:
    assert clean("at 0x7f00aa12 in /usr/lib/python3/x.py: bad") == "at <address> in <path>: bad"
    assert clean("\ud800") == "?"
    assert len(clean("x" * 10_000)) == 200


def test_at_most_ten_findings() -> None:
    fault = validation_fault(
        [{"loc": ("body", "a" * 500, i), "msg": "m" * 999, "type": "x"} for i in range(50)]
    )
    assert fault.message.endswith("and 40 more")
    assert len(fault.message) < 2100
    assert orjson.dumps(fault.message)
