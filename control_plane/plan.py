"""From a validated body to engine requests: tokenising, limits that need the model, sampling parameters.

A `Plan` holds all that the answer's shape needs; nothing has been submitted yet.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from control_plane.schemas import (
    ChatBody,
    CompletionBody,
    NamedTool,
    ResponseFormat,
    Sampling,
    Tool,
    schema_text,
)
from control_plane.service import EngineService
from runtime.errors import ContextTooLong, InvalidRequest
from runtime.request import GrammarSpec, Request, SamplingParams

MAX_SEQUENCES = 512  # prompts x n of one call
DEFAULT_MAX_TOKENS = 16
MIN_TOP_P = 1e-6  # what top_p = 0 means: the best token alone
MAX_TOOL_CALLS = 8
TRAFFIC_KEY = "traffic_key"  # of a request's metadata


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call; `text` is what `echo` repeats."""

    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One call: its requests in choice order, and what shapes the answer. `num_new` 0 means that nothing is generated."""

    call_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    num_choices: int
    num_new: int
    deadline_s: float | None
    tool_name: str | None = None  # the named tool whose arguments the text is
    is_tool_list: bool = False  # the text is a JSON list of tool calls

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


async def plan_chat(service: EngineService, body: ChatBody, timeout_s: float | None, key_id: str) -> Plan:
    deadline_s = _admit(service, body, timeout_s)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if body.tools and body.tool_choice in (None, "auto"):
        raise InvalidRequest(
            "The model cannot choose tools itself; use tool_choice none, required or a name.", param="tools"
        )
    prompt_tools = tools if body.tool_choice != "none" else None
    messages = [message.plain() for message in body.messages]
    ids = await service.text.encode_chat(messages, prompt_tools or None, body.chat_template_kwargs)
    num_new = body.token_limit
    if num_new is None:
        num_new = max(1, service.model.card.max_context - len(ids))
    grammar = _tool_grammar(body) or _format_grammar(body.response_format)
    params = _params(body, num_new, grammar, (body.top_logprobs or 0) if body.logprobs else None)
    plan = await _plan(service, body, "chatcmpl", (Prompt(tuple(ids)),), params, num_new, deadline_s, key_id)
    if isinstance(body.tool_choice, NamedTool):
        return replace(plan, tool_name=body.tool_choice.function.name)
    return replace(plan, is_tool_list=body.tool_choice == "required")


async def plan_completion(
    service: EngineService, body: CompletionBody, timeout_s: float | None, key_id: str
) -> Plan:
    deadline_s = _admit(service, body, timeout_s)
    if len(body.prompts) * body.num_choices > MAX_SEQUENCES:
        raise InvalidRequest(f"Prompts times n is over the limit of {MAX_SEQUENCES}.", param="prompt")
    prompts = await _prompts(service, body)
    num_new = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(body, num_new, _format_grammar(body.response_format), body.logprobs)
    if body.echo and body.logprobs:  # 0 asks for the chosen tokens alone, and nobody chose the prompt
        params = replace(params, prompt_logprobs=body.logprobs)
    return await _plan(service, body, "cmpl", prompts, params, num_new, deadline_s, key_id)


def _admit(service: EngineService, body: Sampling, timeout_s: float | None) -> float | None:
    """What can be refused before any work on the text. Returns the deadline."""
    deadline_s = service.admit(timeout_s)
    service.require_model(body.model)
    max_n = service.config.server.max_n
    if body.num_choices > max_n:
        raise InvalidRequest(f"n is {body.num_choices}, the limit is {max_n}.", param="n")
    return deadline_s


async def _prompts(service: EngineService, body: CompletionBody) -> tuple[Prompt, ...]:
    prompts = body.prompts
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        service.text.check_size("".join(texts), "prompt")
        return tuple([Prompt(tuple(await service.text.encode(t, add_special_tokens=True)), t) for t in texts])
    found = []
    for ids in prompts:
        _check_ids(service, ids)  # type: ignore[arg-type]
        found.append(Prompt(tuple(ids), await service.text.decode(ids) if body.echo else ""))  # type: ignore[arg-type]
    return tuple(found)


def _check_ids(service: EngineService, ids: Sequence[int]) -> None:
    card = service.model.card
    if len(ids) > card.max_context:
        raise ContextTooLong(
            f"The prompt has {len(ids)} tokens, the context {card.max_context}.", param="prompt"
        )
    if ids and max(ids) >= card.vocab_size:
        raise InvalidRequest(
            f"Token id {max(ids)} is outside of the vocabulary of {card.vocab_size}.", param="prompt"
        )


async def _plan(
    service: EngineService,
    body: Sampling,
    prefix: str,
    prompts: tuple[Prompt, ...],
    params: SamplingParams,
    num_new: int,
    deadline_s: float | None,
    key_id: str,
) -> Plan:
    card = service.model.card
    for prompt in prompts:
        if not prompt.ids:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if len(prompt.ids) + params.max_tokens > card.max_context:
            raise ContextTooLong(
                f"The context holds {card.max_context} tokens; the prompt has {len(prompt.ids)} and "
                f"{params.max_tokens} more were asked for.",
                param="messages" if prefix == "chatcmpl" else "prompt",
            )
    if params.logit_bias and max(token for token, _ in params.logit_bias) >= card.vocab_size:
        raise InvalidRequest("logit_bias names a token outside of the vocabulary.", param="logit_bias")
    if params.grammar is not None:
        await service.text.check_grammar(params.grammar)
    call_id = f"{prefix}-{secrets.token_hex(12)}"
    now = time.monotonic()
    latest_start_s = now + service.config.server.queue_timeout
    if deadline_s is not None:
        latest_start_s = min(latest_start_s, deadline_s)
    requests = [
        Request(
            f"{call_id}-{index}",
            prompts[index // body.num_choices].ids,
            _with_seed(params, index % body.num_choices),
            now,
            latest_start_s,
            body.priority or 0,
            _cache_salt(key_id, body.cache_salt),
            _traffic_key(key_id, body),
        )
        for index in range(len(prompts) * body.num_choices)
    ]
    return Plan(
        call_id, int(time.time()), body.model, prompts, tuple(requests), body.num_choices, num_new, deadline_s
    )


def _cache_salt(key_id: str, asked: str | None) -> str:
    """Prefixes are shared within one key only: a hit would tell what others have sent (CVE-2025-46570)."""
    return f"{key_id}:{asked or ''}" if key_id or asked else ""


def _traffic_key(key_id: str, body: Sampling) -> str:
    """What the caller says, apart from what others do, else who it is: texts of one caller are alike more often than not."""
    asked = (body.metadata or {}).get(TRAFFIC_KEY)
    return f"{key_id}:{asked}" if key_id and asked else asked or key_id


def _params(
    body: Sampling, num_new: int, grammar: GrammarSpec | None, logprobs: int | None
) -> SamplingParams:
    """At least one token is asked for: scoring a prompt needs a step, and `num_new` 0 drops the token later."""
    if (body.min_tokens or 0) > num_new:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, over max_tokens {num_new}.", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max(1, num_new),
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(MIN_TOP_P, body.top_p),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logit_bias=_logit_bias(body),
        logprobs=logprobs,
        grammar=grammar,
    )


def _logit_bias(body: Sampling) -> tuple[tuple[int, float], ...]:
    """A bias of 0 changes nothing, whatever its key; every other key must be a token id."""
    found = {key: bias for key, bias in (body.logit_bias or {}).items() if bias}
    if not all(key.isascii() and key.isdigit() for key in found):
        raise InvalidRequest("The keys of logit_bias must be token ids.", param="logit_bias")
    return tuple((int(key), bias) for key, bias in found.items())


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one call differ although their seed is given once."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice + (1 << 63)) % (1 << 64) - (1 << 63))


def _format_grammar(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec("json_object", "")
    return GrammarSpec("json_schema", schema_text(wanted.json_schema.schema_ or {}))  # type: ignore[union-attr]


def _tool_grammar(body: ChatBody) -> GrammarSpec | None:
    """A schema that makes the text the arguments of the named tool, or a list of calls when one is required."""
    if isinstance(body.tool_choice, NamedTool):
        tool = next(t for t in body.tools or () if t.function.name == body.tool_choice.function.name)
        return GrammarSpec("json_schema", orjson.dumps(_parameters(tool)).decode())
    if body.tool_choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in body.tools or ()
    ]
    most = 1 if body.parallel_tool_calls is False else MAX_TOOL_CALLS
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
    return GrammarSpec("json_schema", orjson.dumps(schema).decode())


def _parameters(tool: Tool) -> dict[str, object]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
