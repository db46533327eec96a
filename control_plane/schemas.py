"""Wire types of the API. Every number is finite and bounded, every string and list too; unknown fields are ignored.

Types are strict: "1" is not a number. Rules between fields that need no model live here, the others in `plan.py`.
"""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from runtime.request import MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS

MAX_TOKENS = 1 << 20
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TEXT = 8 << 20  # characters; the body limit and max_prompt_bytes are lower, this only closes the type
MAX_SCHEMA_BYTES = 16 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_TOOLS = 128
# Fields of other servers that change the text. Ignoring one would return other text as if all were well.
FOREIGN_FIELDS = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag",
     "json_schema", "regex", "ebnf", "grammar", "bad_words", "allowed_token_ids", "logits_processors",
     "chat_template", "continue_final_message"}
)  # fmt: skip
_GRAMMAR_WORDS = FOREIGN_FIELDS - {"bad_words", "allowed_token_ids", "logits_processors", "chat_template"}

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Wire(BaseModel):
    """Base of request bodies: strict, finite, and it remembers unknown fields so that they can be listed."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class Closed(BaseModel):
    """Base of parts of a body: strict, finite, unknown fields dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Closed):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Wire):
    """What chat and plain completions share."""

    model: Name
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = (
        None
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(max_length=20)], Bias], Field(max_length=1024)] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    user: str | None = Field(None, max_length=512)
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.stream_options is not None and self.stream is None:
            raise ValueError("stream_options needs stream: true")
        foreign = sorted(FOREIGN_FIELDS & set(self.model_extra or ()))
        if foreign:
            hint = "; use response_format" if foreign[0] in _GRAMMAR_WORDS else ""
            raise ValueError(f"{foreign[0]} is not supported{hint}")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=0, le=128)
    suffix: str | None = Field(None, max_length=65536)
    response_format: "ResponseFormat | None" = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of and self.best_of != self.num_choices:
            raise ValueError("best_of other than n is not supported")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, whichever of the four forms was sent."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt  # type: ignore[list-item, return-value]


class TextPart(Closed):
    type: Literal["text"]
    text: Text


class FunctionCall(Closed):
    name: Name
    arguments: Text


class ToolCall(Closed):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Closed):
    """One turn. Any role is handed to the template; null content is for turns that only call tools."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=1024)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)

    def plain(self) -> dict[str, Any]:
        """The message for the template: parts joined, fields that were not sent left out."""
        data = self.model_dump(exclude_none=True)
        if not isinstance(self.content, str):
            data["content"] = "\n".join(part.text for part in self.content or ())
        return data


class JsonSchema(Closed):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = Field(None, max_length=4096)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise ValueError("response_format of type json_schema needs json_schema.schema")
            schema_text(self.json_schema.schema_)
        return self


class Function(Closed):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-.]{1,64}$")]
    description: str | None = Field(None, max_length=16384)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Closed):
    type: Literal["function"]
    function: Function


class NamedFunction(Closed):
    name: Name


class NamedTool(Closed):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    store: bool | None = None
    chat_template_kwargs: Annotated[dict[Name, bool | int | Name], Field(max_length=16)] | None = None

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[Tool] | None) -> list[Tool] | None:
        for tool in tools or ():
            schema_text(tool.function.parameters or {})
        return tools

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice is not None and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not in tools")
        if "functions" in (self.model_extra or {}) and self.function_call is None:
            raise ValueError("functions is not supported; use tools")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeBody(Wire):
    """POST /tokenize: a prompt or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: (
        Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("send one of prompt, content and messages")
        return self


class DetokenizeBody(Wire):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


class StoredUpdate(Wire):
    """POST /v1/chat/completions/{id}."""

    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ]


def schema_text(schema: dict[str, Any]) -> str:
    """A JSON schema as text. Raises ValueError when it is larger or deeper than a grammar may be."""
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise ValueError(f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        text = orjson.dumps(schema)
    except (TypeError, ValueError):
        raise ValueError("the JSON schema holds a value that JSON cannot carry") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"the JSON schema is larger than {MAX_SCHEMA_BYTES} bytes")
    return text.decode()


def _is_deeper(value: Any, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_is_deeper(child, limit - 1) for child in children)


CompletionBody.model_rebuild()
