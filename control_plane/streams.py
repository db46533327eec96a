"""Streams in OpenAI's shape: writers that turn token events into chunks, and the frames of one stream."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from control_plane.answers import (
    Choice,
    completion_scores,
    head_of,
    new_ids,
    nothing_new,
    tool_call,
    tool_calls,
    usage,
    whole_prompt,
    without_new,
)
from control_plane.call import Call
from control_plane.logprobs import chat_logprobs
from control_plane.plan import Plan
from control_plane.schemas import ChatBody, CompletionBody, Sampling
from control_plane.service import EngineService
from control_plane.sse import KEEP_ALIVE, frame
from runtime.request import TokenEvent, TokenLogprob


class Writer(Protocol):
    """Turns the events of a stream into frames."""

    def start(self) -> bytes: ...
    def on_event(self, index: int, event: TokenEvent) -> bytes: ...
    def end(self) -> bytes: ...


async def stream(call: Call | None, plan: Plan, writer: Writer) -> AsyncGenerator[bytes]:
    """Frames of one stream, with a comment whenever nothing happens for a while."""
    if start := writer.start():
        yield start
    if call is None:
        for index in range(len(plan.requests)):
            yield writer.on_event(index, nothing_new(plan))
    else:
        async for batch in call.batches():
            events = ((i, without_new(e) if plan.num_new == 0 else e) for i, e in batch)
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
        self._head = head_of(service.model.card, plan, "chat.completion.chunk")
        self._usage = _Usage(plan, body)
        self._tool_texts = [""] * len(plan.requests)

    def start(self) -> bytes:
        delta: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        if self._plan.tool_name is not None:
            delta["content"] = None
        frames = []
        for index in range(len(self._plan.requests)):
            if self._plan.tool_name is not None:
                delta["tool_calls"] = [{"index": 0} | tool_call(self._plan.tool_name, "")]
            frames.append(self._chunk(index, delta))
        return b"".join(frames)

    def on_event(self, index: int, event: TokenEvent) -> bytes:
        self._usage.add(index, event)
        scores = None
        if self._body.logprobs and event.logprobs:
            scores = chat_logprobs(event.logprobs, self._tokenizer, self._body.top_logprobs or 0)
        extra = new_ids(self._body, event.token_ids)
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
            calls = [{"index": i} | call for i, call in enumerate(tool_calls(self._plan, text))]
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
        self._head = head_of(service.model.card, plan, "text_completion")
        self._usage = _Usage(plan, body)
        self._scores = completion_scores(service.model.tokenizer, plan, body)
        self._has_prompt_to_echo = [bool(body.echo)] * len(plan.requests)

    def start(self) -> bytes:
        return b""

    def on_event(self, index: int, event: TokenEvent) -> bytes:
        self._usage.add(index, event)
        frames = []
        if self._has_prompt_to_echo[index]:
            self._has_prompt_to_echo[index] = False
            scores = self._piece(index, whole_prompt(self._plan, index, event.prompt_logprobs))
            frames.append(self._chunk(index, self._plan.prompt_of(index).text, scores))
        scores = self._piece(index, event.logprobs)
        extra = new_ids(self._body, event.token_ids)
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
