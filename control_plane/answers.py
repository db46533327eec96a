"""Answers in OpenAI's shape: whole ones, and writers that turn token events into chunks of a stream."""

import hashlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from control_plane.engine_handle import ModelCard, Tokenizer
from control_plane.logprobs import CompletionLogprobs, chat_logprobs
from control_plane.plan import Plan
from control_plane.schemas import ChatBody, CompletionBody, Sampling
from control_plane.service import Call, EngineService
from control_plane.sse import KEEP_ALIVE, frame
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


class Writer(Protocol):
    """Turns the events of a stream into frames."""

    def start(self) -> bytes: ...
    def on_event(self, index: int, event: TokenEvent) -> bytes: ...
    def end(self) -> bytes: ...


# -- whole answers ----------------------------------------------------------------------------------------------


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
            choice.add(_nothing_new(plan))
        return choices
    try:
        async for batch in call.batches():
            for index, event in batch:
                choices[index].add(_without_new(event) if plan.num_new == 0 else event)
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
        found.append(entry | {"stop_reason": choice.stop_reason} | _ids(body, choice.token_ids))
    head = _head(service.model.card, plan, "chat.completion")
    return head | {"choices": found, "usage": usage(plan, choices)} | _prompt_ids(body, plan)


async def completion_answer(service: EngineService, plan: Plan, body: CompletionBody) -> dict[str, Any]:
    scorers, found = _completion_scores(service.model.tokenizer, plan, body), []
    choices = await collect(service, plan)
    for index, choice in enumerate(choices):
        text = (plan.prompt_of(index).text if body.echo else "") + choice.text
        prompt_scores = _whole_prompt(plan, index, choice.prompt_logprobs)
        scores = scorers[index].piece([*prompt_scores, *choice.logprobs]) if scorers else None
        entry = {"index": index, "text": text, "logprobs": scores, "finish_reason": choice.finish_reason}
        found.append(entry | {"stop_reason": choice.stop_reason} | _ids(body, choice.token_ids))
    head = _head(service.model.card, plan, "text_completion")
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
    calls = _tool_calls(plan, choice.text)
    if not calls:
        return message, choice.finish_reason
    finish = "tool_calls" if plan.is_tool_list and choice.finish_reason == "stop" else choice.finish_reason
    return message | {"content": None, "tool_calls": calls}, finish


def _tool_calls(plan: Plan, text: str) -> list[dict[str, Any]]:
    """The calls in a forced tool's text; none when a required list was cut short."""
    if plan.tool_name is not None:
        return [_tool_call(plan.tool_name, text)]
    if not plan.is_tool_list:
        return []
    try:
        calls = orjson.loads(text)
        return [_tool_call(call["name"], orjson.dumps(call["arguments"]).decode()) for call in calls]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _head(card: ModelCard, plan: Plan, kind: str) -> dict[str, Any]:
    return {
        "id": plan.call_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": fingerprint(card),
    }


def _ids(body: Sampling, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"token_ids": list(token_ids)} if body.return_token_ids else {}


def _prompt_ids(body: Sampling, plan: Plan) -> dict[str, Any]:
    return {"prompt_token_ids": list(plan.prompts[0].ids)} if body.return_token_ids else {}


def _nothing_new(plan: Plan) -> TokenEvent:
    return TokenEvent(plan.call_id, finish_reason=FinishReason.LENGTH)


def _without_new(event: TokenEvent) -> TokenEvent:
    """The event of a request that only scored its prompt."""
    reason = event.finish_reason and FinishReason.LENGTH
    return TokenEvent(event.request_id, prompt_logprobs=event.prompt_logprobs, finish_reason=reason)


# -- streams ----------------------------------------------------------------------------------------------------


async def stream(call: Call | None, plan: Plan, writer: Writer) -> AsyncGenerator[bytes]:
    """Frames of one stream, with a comment whenever nothing happens for a while."""
    if start := writer.start():
        yield start
    if call is None:
        for index in range(len(plan.requests)):
            yield writer.on_event(index, _nothing_new(plan))
    else:
        async for batch in call.batches():
            events = ((i, _without_new(e) if plan.num_new == 0 else e) for i, e in batch)
            data = b"".join([writer.on_event(index, event) for index, event in events])
            if data or not batch:
                yield data or KEEP_ALIVE
    if end := writer.end():
        yield end


class _Usage:
    """Which chunks of a stream carry usage, and the counts so far."""

    def __init__(self, plan: Plan, body: Sampling) -> None:
        options = body.stream_options
        self.is_wanted = bool(options and options.include_usage)
        self._is_continuous = bool(self.is_wanted and options and options.continuous_usage_stats)
        self._plan = plan
        self.choices = [Choice() for _ in plan.requests]

    def add(self, index: int, event: TokenEvent) -> None:
        choice = self.choices[index]
        choice.token_ids += event.token_ids
        choice.num_cached = max(choice.num_cached, event.num_cached_tokens)

    def field(self) -> dict[str, Any]:
        if not self.is_wanted:
            return {}
        return {"usage": usage(self._plan, self.choices) if self._is_continuous else None}

    def last(self, head: dict[str, Any]) -> bytes:
        if not self.is_wanted:
            return b""
        return frame(head | {"choices": [], "usage": usage(self._plan, self.choices)})


class ChatWriter:
    """Chunks of a chat completion: role first, then deltas, then an empty delta with the finish reason."""

    def __init__(self, service: EngineService, plan: Plan, body: ChatBody) -> None:
        self._tokenizer = service.model.tokenizer
        self._plan, self._body = plan, body
        self._head = _head(service.model.card, plan, "chat.completion.chunk")
        self._usage = _Usage(plan, body)
        self._tool_texts = [""] * len(plan.requests)

    def start(self) -> bytes:
        delta: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        if self._plan.tool_name is not None:
            delta["content"] = None
        frames = []
        for index in range(len(self._plan.requests)):
            if self._plan.tool_name is not None:
                delta["tool_calls"] = [{"index": 0} | _tool_call(self._plan.tool_name, "")]
            frames.append(self._chunk(index, delta))
        return b"".join(frames)

    def on_event(self, index: int, event: TokenEvent) -> bytes:
        self._usage.add(index, event)
        scores = None
        if self._body.logprobs and event.logprobs:
            scores = chat_logprobs(event.logprobs, self._tokenizer, self._body.top_logprobs or 0)
        extra = _ids(self._body, event.token_ids)
        data = b""
        if event.text or scores or extra.get("token_ids"):
            data = self._chunk(index, self._delta(index, event.text), scores, extra)
        if event.finish_reason is not None:
            data += self._finish(index, event)
        return data

    def end(self) -> bytes:
        return self._usage.last(self._head)

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self._plan.tool_name is not None:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        if self._plan.is_tool_list:  # calls are whole when the list is; its text is not the user's
            self._tool_texts[index] += text
            return {}
        return {"content": text}

    def _finish(self, index: int, event: TokenEvent) -> bytes:
        data, finish = b"", event.finish_reason.value if event.finish_reason else None
        if self._plan.is_tool_list:
            text = self._tool_texts[index]
            calls = [{"index": i} | call for i, call in enumerate(_tool_calls(self._plan, text))]
            data = self._chunk(index, {"tool_calls": calls} if calls else {"content": text})
            finish = "tool_calls" if calls and finish == "stop" else finish
        return data + self._chunk(index, {}, None, {"stop_reason": event.stop_reason}, finish)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        scores: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": scores,
            "finish_reason": finish,
            **(extra or {}),
        }
        return frame({**self._head, "choices": [choice], **self._usage.field()})


class CompletionWriter:
    """Chunks of a plain completion; with `echo` the first of each choice is its prompt."""

    def __init__(self, service: EngineService, plan: Plan, body: CompletionBody) -> None:
        self._plan, self._body = plan, body
        self._head = _head(service.model.card, plan, "text_completion")
        self._usage = _Usage(plan, body)
        self._scores = _completion_scores(service.model.tokenizer, plan, body)
        self._has_prompt_to_echo = [bool(body.echo)] * len(plan.requests)

    def start(self) -> bytes:
        return b""

    def on_event(self, index: int, event: TokenEvent) -> bytes:
        self._usage.add(index, event)
        frames = []
        if self._has_prompt_to_echo[index]:
            self._has_prompt_to_echo[index] = False
            scores = self._piece(index, _whole_prompt(self._plan, index, event.prompt_logprobs))
            frames.append(self._chunk(index, self._plan.prompt_of(index).text, scores))
        scores = self._piece(index, event.logprobs)
        extra = _ids(self._body, event.token_ids)
        if event.text or scores or extra.get("token_ids"):
            frames.append(self._chunk(index, event.text, scores, extra))
        if event.finish_reason is not None:
            stop = {"stop_reason": event.stop_reason}
            frames.append(self._chunk(index, "", None, stop, event.finish_reason.value))
        return b"".join(frames)

    def end(self) -> bytes:
        return self._usage.last(self._head)

    def _piece(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._scores[index].piece(entries) if self._scores and entries else None

    def _chunk(
        self,
        index: int,
        text: str,
        scores: dict[str, Any] | None,
        extra: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": finish, **(extra or {})}
        return frame({**self._head, "choices": [choice], **self._usage.field()})


def _whole_prompt(plan: Plan, index: int, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Scores of all prompt tokens where they were asked for: nothing predicts the first, so the engine leaves it out."""
    ids = plan.prompt_of(index).ids
    is_scored = plan.requests[index].params.prompt_logprobs is not None
    return [TokenLogprob(ids[0], None), *entries] if is_scored and len(entries) < len(ids) else entries


def _completion_scores(tokenizer: Tokenizer, plan: Plan, body: CompletionBody) -> list[CompletionLogprobs]:
    """One running scorer for each choice; empty when no scores were asked for.

    Offsets count from the start of the text: behind the echoed prompt where that is not scored.
    """
    if body.logprobs is None:
        return []
    skips_prompt = bool(body.echo) and not body.logprobs
    offsets = [len(plan.prompt_of(i).text) if skips_prompt else 0 for i in range(len(plan.requests))]
    return [CompletionLogprobs(tokenizer, body.logprobs, offset) for offset in offsets]
