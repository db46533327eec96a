"""Whole answers in OpenAI's shape, and the parts that they share with streams (`streams.py`)."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from control_plane.call import Call
from control_plane.engine_handle import ModelCard, Tokenizer
from control_plane.logprobs import CompletionLogprobs, chat_logprobs
from control_plane.plan import Plan
from control_plane.schemas import ChatBody, CompletionBody, Sampling
from control_plane.service import EngineService
from runtime.request import FinishReason, TokenEvent, TokenLogprob


@dataclass(slots=True)
class Choice:
    """What has arrived for one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.num_cached = max(self.num_cached, event.num_cached_tokens)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason.value, event.stop_reason


def open_call(service: EngineService, plan: Plan) -> Call | None:
    """Submits the plan; None when it needs no engine (nothing to generate, nothing to score)."""
    if plan.num_new == 0 and plan.requests[0].params.prompt_logprobs is None:
        return None
    return service.open(plan.requests, plan.deadline_s)


async def collect(service: EngineService, plan: Plan) -> list[Choice]:
    """Runs the plan to its end."""
    choices = [Choice() for _ in plan.requests]
    call = open_call(service, plan)
    if call is None:
        for choice in choices:
            choice.add(nothing_new(plan))
        return choices
    try:
        async for batch in call.batches():
            for index, event in batch:
                choices[index].add(without_new(event) if plan.num_new == 0 else event)
    finally:
        call.close()
    return choices


async def chat_answer(service: EngineService, plan: Plan, body: ChatBody) -> dict[str, Any]:
    tokenizer, found = service.model.tokenizer, []
    choices = await collect(service, plan)
    for index, choice in enumerate(choices):
        message, finish = _message(plan, choice)
        scores = chat_logprobs(choice.logprobs, tokenizer, body.top_logprobs or 0) if body.logprobs else None
        entry = {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}
        found.append(entry | {"stop_reason": choice.stop_reason} | new_ids(body, choice.token_ids))
    head = head_of(service.model.card, plan, "chat.completion")
    return head | {"choices": found, "usage": usage(plan, choices)} | _prompt_ids(body, plan)


async def completion_answer(service: EngineService, plan: Plan, body: CompletionBody) -> dict[str, Any]:
    scorers, found = completion_scores(service.model.tokenizer, plan, body), []
    choices = await collect(service, plan)
    for index, choice in enumerate(choices):
        text = (plan.prompt_of(index).text if body.echo else "") + choice.text
        prompt_scores = whole_prompt(plan, index, choice.prompt_logprobs)
        scores = scorers[index].piece([*prompt_scores, *choice.logprobs]) if scorers else None
        entry = {"index": index, "text": text, "logprobs": scores, "finish_reason": choice.finish_reason}
        found.append(entry | {"stop_reason": choice.stop_reason} | new_ids(body, choice.token_ids))
    head = head_of(service.model.card, plan, "text_completion")
    return head | {"choices": found, "usage": usage(plan, choices)} | _prompt_ids(body, plan)


def usage(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Each prompt counts once, whatever n."""
    num_prompt, num_new = plan.num_prompt_tokens, sum(len(choice.token_ids) for choice in choices)
    cached = sum(choice.num_cached for choice in choices[:: plan.num_choices])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def fingerprint(card: ModelCard) -> str:
    return "fp_" + hashlib.sha256(f"{card.name}:{card.created}".encode()).hexdigest()[:10]


def _message(plan: Plan, choice: Choice) -> tuple[dict[str, Any], str | None]:
    """The assistant's turn and the finish reason; forced tools turn the text into calls."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    calls = tool_calls(plan, choice.text)
    if not calls:
        return message, choice.finish_reason
    finish = "tool_calls" if plan.is_tool_list and choice.finish_reason == "stop" else choice.finish_reason
    return message | {"content": None, "tool_calls": calls}, finish


def tool_calls(plan: Plan, text: str) -> list[dict[str, Any]]:
    """The calls in a forced tool's text; none when a required list was cut short."""
    if plan.tool_name is not None:
        return [tool_call(plan.tool_name, text)]
    if not plan.is_tool_list:
        return []
    try:
        calls = orjson.loads(text)
        return [tool_call(call["name"], orjson.dumps(call["arguments"]).decode()) for call in calls]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def head_of(card: ModelCard, plan: Plan, kind: str) -> dict[str, Any]:
    return {
        "id": plan.call_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": fingerprint(card),
    }


def new_ids(body: Sampling, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"token_ids": list(token_ids)} if body.return_token_ids else {}


def _prompt_ids(body: Sampling, plan: Plan) -> dict[str, Any]:
    return {"prompt_token_ids": list(plan.prompts[0].ids)} if body.return_token_ids else {}


def nothing_new(plan: Plan) -> TokenEvent:
    return TokenEvent(plan.call_id, finish_reason=FinishReason.LENGTH)


def without_new(event: TokenEvent) -> TokenEvent:
    """The event of a request that only scored its prompt."""
    reason = event.finish_reason and FinishReason.LENGTH
    return TokenEvent(event.request_id, prompt_logprobs=event.prompt_logprobs, finish_reason=reason)


def whole_prompt(plan: Plan, index: int, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Scores of all prompt tokens where they were asked for: nothing predicts the first, so the engine leaves it out."""
    ids = plan.prompt_of(index).ids
    is_scored = plan.requests[index].params.prompt_logprobs is not None
    return [TokenLogprob(ids[0], None), *entries] if is_scored and len(entries) < len(ids) else entries


def completion_scores(tokenizer: Tokenizer, plan: Plan, body: CompletionBody) -> list[CompletionLogprobs]:
    """One running scorer for each choice; empty when no scores were asked for.

    Offsets count from the start of the text: behind the echoed prompt where that is not scored.
    """
    if body.logprobs is None:
        return []
    skips_prompt = bool(body.echo) and not body.logprobs
    offsets = [len(plan.prompt_of(i).text) if skips_prompt else 0 for i in range(len(plan.requests))]
    return [CompletionLogprobs(tokenizer, body.logprobs, offset) for offset in offsets]
