"""Chat completions: the shape of answers and chunks, and the rules between fields."""

from typing import Any

import httpx
import orjson
import pytest

from tests.control_plane.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"model": "fake", "messages": HI} | fields)


async def chunks(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await ask(client, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return [orjson.loads(frame) for frame in frames[:-1]]


async def test_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    body = (await ask(client, max_completion_tokens=4, max_tokens=9)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["system_fingerprint"].startswith("fp_")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "user", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 9
    assert body["usage"]["total_tokens"] == 13


async def test_default_limit_is_the_rest_of_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(client)
    assert engine.submitted[0].params.max_tokens == engine.card.max_context - 9


async def test_zero_tokens_need_no_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await ask(client, max_tokens=0)).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert engine.submitted == []


async def test_stream_is_role_deltas_empty_finish(client: httpx.AsyncClient) -> None:
    found = await chunks(client, max_tokens=3)
    choices = [chunk["choices"][0] for chunk in found]
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[0]["delta"]["content"] == ""
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": c} for c in "use"]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert len({(chunk["id"], chunk["created"]) for chunk in found}) == 1
    assert not any("usage" in chunk for chunk in found)


async def test_include_usage_adds_a_last_chunk_and_nulls(client: httpx.AsyncClient) -> None:
    *others, last = await chunks(client, max_tokens=3, n=2, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (9, 6)


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c["usage"]["completion_tokens"] for c in await chunks(client, max_tokens=3, stream_options=options)
    ]
    assert counts == [0, 1, 2, 3, 3, 3]


async def test_choices_differ_in_seed_and_keep_their_index(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = (await ask(client, n=3, seed=(1 << 63) - 1, max_tokens=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.params.seed for request in engine.submitted] == [
        (1 << 63) - 1,
        -(1 << 63),
        -(1 << 63) + 1,
    ]


async def test_logprobs_join_to_the_text(client: httpx.AsyncClient) -> None:
    body = (await ask(client, logprobs=True, top_logprobs=2, max_tokens=4)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "user"
    assert all(entry["logprob"] <= 0 and entry["bytes"] == list(entry["token"].encode()) for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4


async def test_stop_string_is_cut_and_named(client: httpx.AsyncClient) -> None:
    choice = (await ask(client, stop=["er:"])).json()["choices"][0]
    assert choice["message"]["content"] == "us"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "er:")
    found = await chunks(client, stop="er:")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found) == "us"


async def test_ignored_fields_are_listed(client: httpx.AsyncClient) -> None:
    answer = await ask(client, max_tokens=1, colour="red", **{f"x{i}": 1 for i in range(40)})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"].startswith("colour, x0, x1")
    assert answer.headers["x-ignored-fields"].endswith("and-25-more")


async def test_text_parts_developer_role_and_empty_content(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert (await ask(client, messages=messages, max_tokens=1)).status_code == 200
    assert bytes(engine.submitted[0].prompt_ids) == b"developer: a\nb\nassistant: \ntool: 4\n"


async def test_json_schema_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    body = (await ask(client, response_format=wanted)).json()
    assert orjson.loads(body["choices"][0]["message"]["content"]) == {"city": "text"}
    grammar = engine.submitted[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, orjson.loads(grammar.source)) == ("json_schema", SCHEMA)


async def test_named_tool_becomes_a_call(client: httpx.AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body = (await ask(client, tools=[TOOL], tool_choice=choice)).json()
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"text"}'}
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_required_tool_streams_whole_calls(client: httpx.AsyncClient) -> None:
    found = [chunk["choices"][0] for chunk in await chunks(client, tools=[TOOL], tool_choice="required")]
    calls = [call for choice in found for call in choice["delta"].get("tool_calls", [])]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in calls] == [
        (0, "function", "weather")
    ]
    assert orjson.loads(calls[0]["function"]["arguments"]) == {"city": "text"}
    assert found[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"forbidden": 1}}}},
            "compiled",
        ),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tools"),
        ({"tools": [TOOL]}, "tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"n": 10**9}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 4090}, "4096"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"foo": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
async def test_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], word: str
) -> None:
    answer = await ask(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]
    assert engine.submitted == []


async def test_stored_completions_can_be_listed_found_and_removed(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 1, "store": True, "metadata": {"a": "b"}}
    made = (await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})).json()
    url = "/v1/chat/completions"
    assert [item["id"] for item in (await client.get(url)).json()["data"]] == [made["id"]]
    assert (await client.get(url, params={"metadata[a]": "c"})).json()["data"] == []
    assert (await client.get(f"{url}/mine")).json()["choices"] == made["choices"]
    updated = await client.post(f"{url}/{made['id']}", json={"metadata": {"c": "d"}})
    assert updated.json()["metadata"] == {"c": "d"}
    assert (await client.delete(f"{url}/{made['id']}")).json()["deleted"] is True
    assert (await client.get(f"{url}/{made['id']}")).status_code == 404
