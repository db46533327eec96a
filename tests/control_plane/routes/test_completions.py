"""Plain completions: four forms of prompt, echo, scoring, streams."""

from typing import Any

import httpx
import orjson
import pytest

from tests.control_plane.fake_engine import FakeEngine


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "fake", "prompt": "hello"} | fields)


async def test_answer_has_openais_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await ask(client)).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert engine.submitted[0].params.max_tokens == 16


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
async def test_prompts_times_n(client: httpx.AsyncClient, prompt: list[Any]) -> None:
    body = (await ask(client, prompt=prompt, n=2, max_tokens=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 8


async def test_token_ids_as_prompt(client: httpx.AsyncClient) -> None:
    assert (await ask(client, prompt=[97, 98], echo=True, max_tokens=1)).json()["choices"][0]["text"] == "aba"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring_as_lm_eval_does(client: httpx.AsyncClient, max_tokens: int) -> None:
    body = (await ask(client, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)).json()
    scores = body["choices"][0]["logprobs"]
    assert scores["tokens"] == list("hello") + ["h"] * max_tokens
    assert scores["token_logprobs"] == [None] + [-0.25] * (4 + max_tokens)
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][1] == {"e": -0.25}
    assert scores["text_offset"] == list(range(5 + max_tokens))
    assert body["usage"]["completion_tokens"] == max_tokens


async def test_zero_logprobs_score_the_chosen_tokens_alone(client: httpx.AsyncClient) -> None:
    body = (await ask(client, echo=True, logprobs=0, max_tokens=2)).json()
    scores = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "hellohe"
    assert (scores["tokens"], scores["text_offset"]) == (["h", "e"], [5, 6])


async def test_echo_without_new_tokens_or_scores_needs_no_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = (await ask(client, echo=True, max_tokens=0)).json()
    assert body["choices"][0]["text"] == "hello"
    assert engine.submitted == []


async def test_stream_with_echo_and_scores(client: httpx.AsyncClient) -> None:
    answer = await ask(
        client, stream=True, echo=True, logprobs=1, max_tokens=2, stream_options={"include_usage": True}
    )
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    found = [orjson.loads(frame) for frame in frames[:-1]]
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    assert [choice["text"] for choice in choices] == ["hello", "h", "e", ""]
    assert [offset for choice in choices[:-1] for offset in choice["logprobs"]["text_offset"]] == list(
        range(7)
    )
    assert choices[-1]["finish_reason"] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 2
    assert frames[-1] == "[DONE]"


async def test_ignore_eos_and_min_tokens(client: httpx.AsyncClient) -> None:
    assert (await ask(client, ignore_eos=True, max_tokens=7)).json()["choices"][0]["text"] == "hellohe"
    assert (await ask(client, min_tokens=6, max_tokens=9)).json()["usage"]["completion_tokens"] == 7


async def test_stop_token_ids_and_return_token_ids(client: httpx.AsyncClient) -> None:
    body = (await ask(client, stop_token_ids=[111], return_token_ids=True)).json()
    assert body["choices"][0]["text"] == "hell"
    assert body["choices"][0]["stop_reason"] == 111
    assert body["choices"][0]["token_ids"] == list(b"hello")
    assert body["prompt_token_ids"] == list(b"hello")


async def test_characters_are_never_halved(client: httpx.AsyncClient) -> None:
    answer = await ask(client, prompt="é€🙂", stream=True)
    frames = [orjson.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [c["choices"][0]["text"] for c in frames] == ["é", "€", "🙂", ""]


async def test_salt_and_priority_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, cache_salt="s", priority=-3)
    assert (engine.submitted[0].cache_salt, engine.submitted[0].priority) == (":s", -3)


async def test_the_callers_word_for_its_traffic_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(client, metadata={"traffic_key": "translation", "other": "x"})
    await ask(client)
    assert [request.traffic_key for request in engine.submitted] == ["translation", ""]


async def test_suffix_and_explicit_no_stream_are_listed_as_ignored(client: httpx.AsyncClient) -> None:
    answer = await ask(client, suffix="x", stream=False, stream_options={"include_usage": True})
    assert answer.headers["x-ignored-fields"] == "suffix, stream_options"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [999]}, "vocabulary"),
        ({"prompt": [1] * 5000}, "4096"),
        ({"prompt": ["a"] * 300, "n": 2}, "512"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_refused(client: httpx.AsyncClient, fields: dict[str, Any], word: str) -> None:
    answer = await ask(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]


async def test_prompt_over_the_byte_limit_is_refused_unread(client: httpx.AsyncClient) -> None:
    answer = await ask(client, prompt="word " * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "400000 bytes" in answer.json()["error"]["message"]


async def test_unknown_model_is_404_and_an_alias_works(client: httpx.AsyncClient) -> None:
    answer = await ask(client, model="nope")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert (await ask(client, model="gpt-alias")).json()["model"] == "gpt-alias"
