"""The official client against a real server."""

import openai
import pytest
from pydantic import BaseModel

from tests.control_plane.conftest import Running
from tests.patience import until_async

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(live: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="none", max_retries=0)


def test_create_and_models(sdk: openai.OpenAI) -> None:
    with sdk:
        answer = sdk.chat.completions.create(model="fake", messages=HI, n=2, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
        assert [choice.message.content for choice in answer.choices] == ["user: hi\n"] * 2
        assert answer.choices[0].logprobs is not None
        assert [model.id for model in sdk.models.list()] == ["fake", "gpt-alias"]
        assert sdk.models.retrieve("fake").id == "fake"
        assert sdk.completions.create(model="fake", prompt="abc").choices[0].text == "abc"


def test_streams(sdk: openai.OpenAI) -> None:
    with sdk:
        options = {"include_usage": True}
        stream = sdk.chat.completions.create(
            model="fake", messages=HI, n=2, stream=True, stream_options=options
        )  # type: ignore[call-overload]
        chunks = list(stream)
        for index in (0, 1):
            deltas = [c.choices[0].delta for c in chunks if c.choices and c.choices[0].index == index]
            assert "".join(delta.content or "" for delta in deltas) == "user: hi\n"
            assert [delta.role for delta in deltas if delta.role] == ["assistant"]
        assert chunks[-1].usage.completion_tokens == 20


def test_stream_helper_and_parse(sdk: openai.OpenAI) -> None:
    class Place(BaseModel):
        city: str

    class GetWeather(BaseModel):
        city: str

    with sdk:
        with sdk.chat.completions.stream(model="fake", messages=HI) as stream:  # type: ignore[arg-type]
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.content == "user: hi\n"
        parsed = sdk.chat.completions.parse(model="fake", messages=HI, response_format=Place)  # type: ignore[arg-type]
        assert parsed.choices[0].message.parsed == Place(city="text")
        tool = openai.pydantic_function_tool(GetWeather)
        for choice in ("required", {"type": "function", "function": {"name": "GetWeather"}}):
            with sdk.chat.completions.stream(
                model="fake", messages=HI, tools=[tool], tool_choice=choice
            ) as stream:  # type: ignore[arg-type]
                stream.until_done()
                call = stream.get_final_completion().choices[0].message.tool_calls[0]  # type: ignore[index]
            assert call.function.parsed_arguments == GetWeather(city="text")


def test_errors_are_typed(sdk: openai.OpenAI) -> None:
    with sdk:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            sdk.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.completions.create(model="fake", prompt="a", max_tokens=1 << 19)
        assert caught.value.code == "context_length_exceeded"


async def test_async_client_cancels(live: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.base_url}/v1", api_key="none", max_retries=0) as sdk:
        stream = await sdk.completions.create(
            model="fake", prompt="a", stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await until_async(lambda: live.engine.num_held == 0)
