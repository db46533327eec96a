"""A small engine for tests: a thread that repeats the prompt's bytes, one token a step, with the real one's contract.

Ids 0 to 255 are bytes, 256 ends a text. Text never holds half a character; stop strings are held back and cut.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import orjson

from control_plane.engine_handle import ServedModel
from runtime.adaptive.decision import Decision
from runtime.config import EngineConfig
from runtime.engine.change import Applied, ConfigChange
from runtime.engine.stats import ITL_BOUNDS_S, EngineSnapshot, Histogram, RungSnapshot
from runtime.engine.timelines import Timelines
from runtime.errors import InvalidRequest, QueueFull, Unavailable
from runtime.request import FinishReason, GrammarSpec, Request, SamplingParams, TokenEvent, TokenLogprob
from tests.control_plane.fake_config import FakeConfiguration

EOS_ID = 256
VOCAB_SIZE = 257
_SHARES = {"attention": 0.5, "router": 0.125, "dispatch": 0.0625, "experts": 0.25, "other": 0.0625}
_RUNG = RungSnapshot("decode-8", "decode", 8, "ready", 0.5, False, 0, 3, 20, 24, 0.01, scope_shares=_SHARES)


class ByteTokenizer:
    """A token is a byte."""

    vocab_size = VOCAB_SIZE
    eos_ids = (EOS_ID,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS_ID else b""


class PlainTemplate:
    """`role: content` lines."""

    is_present = True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


class PlainGrammars:
    """Accepts JSON objects as schemas; the property "forbidden" stands for what a real compiler refuses."""

    def validate(self, spec: GrammarSpec) -> None:
        if "forbidden" in spec.source:
            raise InvalidRequest("The schema cannot be compiled.", param="response_format")


@dataclass(frozen=True, slots=True)
class Card:
    name: str = "fake"
    max_context: int = 4096
    vocab_size: int = VOCAB_SIZE
    created: int = 1_700_000_000


@dataclass(slots=True)
class _Row:
    request: Request
    script: list[int]  # tokens still to come, before limits
    data: bytearray = field(default_factory=bytearray)
    num_sent: int = 0  # characters
    num_tokens: int = 0
    is_new: bool = True


class FakeEngine:
    """EngineHandle over a thread. `step_s` is the time of a step, `max_rows` what runs at once, `max_queue` what waits."""

    def __init__(
        self, step_s: float = 0.0, max_rows: int = 64, max_queue: int = 512, card: Card | None = None
    ) -> None:
        self.card = card or Card()
        self.step_s, self.max_rows, self.max_queue = step_s, max_rows, max_queue
        self.state = "ready"
        self.error_after: int | None = None  # tokens after which every request fails
        self.is_stuck = False
        self.aborted: list[str] = []
        self.submitted: list[Request] = []
        self.num_steps = 0
        self.finished: Counter[str] = Counter()
        self.configuration = FakeConfiguration()
        self.histograms: dict[str, Histogram] = {}  # by name in the snapshot; those left out are empty
        self.generation_tokens = 0
        self.timelines = Timelines()
        self.num_snapshots = 0
        self._lock = threading.Condition()
        self._rows: list[_Row] = []
        self._queue: list[_Row] = []
        self._publish: Callable[[list[TokenEvent]], None] = lambda events: None
        self._is_draining = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    # -- the handle ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Its thread runs from the beginning."""

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            if self._is_draining or self.state != "ready":
                raise Unavailable(f"The engine is {self.state}.", retry_after_s=2)
            if len(self._queue) + len(requests) > self.max_queue:
                raise QueueFull("The queue is full.", retry_after_s=3)
            self.submitted += requests
            self._queue += [_Row(request, _script(request)) for request in requests]
            self._lock.notify()

    def abort(self, request_ids: Sequence[str]) -> None:
        gone = set(request_ids)
        with self._lock:
            self.aborted += request_ids
            self._rows = [row for row in self._rows if row.request.request_id not in gone]
            self._queue = [row for row in self._queue if row.request.request_id not in gone]

    def set_publisher(self, publish: Callable[[list[TokenEvent]], None]) -> None:
        self._publish = publish

    @property
    def config(self) -> EngineConfig:
        return self.configuration.config

    def plan(self, config: EngineConfig, must_start: bool = True) -> ConfigChange:
        return self.configuration.plan(config)

    def configure(self, config: EngineConfig) -> Future[Applied]:
        return self.configuration.configure(config, self.state, self.num_steps)

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        return self.configuration.decisions.after(after, limit)

    def decision_counts(self) -> dict[tuple[str, str], int]:
        return self.configuration.decisions.counts

    def order_experts(self, order):
        raise InvalidRequest("parallel.expert_parallel_size is 1: on one device there is nothing to move")

    def begin_drain(self) -> None:
        self._is_draining = True

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        with self._lock:
            self._is_stopped = True
            self._lock.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def num_held(self) -> int:
        """Requests that the engine still holds."""
        with self._lock:
            return len(self._rows) + len(self._queue)

    def snapshot(self) -> EngineSnapshot:
        self.num_snapshots += 1
        waiting = sum(row.request.params.max_tokens for row in self._queue)
        facts = {
            "state": self.state, "error": "", "num_steps": self.num_steps, "num_running": len(self._rows),
            "num_waiting": len(self._queue), "waiting_tokens": waiting, "num_pages": 100, "page_size": 16,
            "used_pages": len(self._rows), "finished": dict(self.finished), "rejected": {"rate_limit_exceeded": 2},
            "rungs": (_RUNG,), "expert_tokens": ((3, 1), (2, 2)), "drain_rate_tokens_s": 1000.0, "demand": {},
            "ladder_change": self.configuration.ladder_change, "policy": self.configuration.policy,
            "generation_tokens": self.generation_tokens, "taken_s": time.monotonic(),
        }  # fmt: skip
        facts |= {name: histogram.copy() for name, histogram in self.histograms.items()}
        rest = {
            f.name: Histogram(ITL_BOUNDS_S) if f.type in (Histogram, "Histogram") else 0
            for f in fields(EngineSnapshot)
            if f.default is MISSING and f.default_factory is MISSING
        }
        return EngineSnapshot(**rest | facts)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._is_stopped and (self.is_stuck or not (self._rows or self._queue)):
                    self._lock.wait(0.05)
                if self._is_stopped:
                    return
                free = self.max_rows - len(self._rows)
                self._rows += self._queue[:free]
                del self._queue[:free]
                events = [self._step(row) for row in self._rows]
                done = {event.request_id for event in events if event.finish_reason is not None}
                self._rows = [row for row in self._rows if row.request.request_id not in done]
                self.num_steps += 1
            if self.step_s:
                time.sleep(self.step_s)
            self._publish(events)

    def _step(self, row: _Row) -> TokenEvent:
        params, request_id = row.request.params, row.request.request_id
        token = row.script[row.num_tokens % len(row.script)] if row.script else EOS_ID
        is_end = row.num_tokens >= len(row.script)
        if is_end and not params.ignore_eos and row.num_tokens >= params.min_tokens:
            token = EOS_ID
        row.num_tokens += 1
        event = TokenEvent(
            request_id,
            (token,),
            logprobs=_scores([token], params.logprobs) if params.logprobs is not None else (),
            prompt_logprobs=_prompt_scores(row) if row.is_new else (),
            num_cached_tokens=2 if row.is_new else 0,
        )
        row.is_new = False
        if self.error_after is not None and row.num_tokens > self.error_after:
            return replace(event, finish_reason=FinishReason.ERROR, error="engine_error: the step failed")
        event = _with_text(row, event, token, params)
        if event.finish_reason is not None:
            self.finished[event.finish_reason.value] += 1
        return event


def served(engine: FakeEngine) -> ServedModel:
    return ServedModel(engine, ByteTokenizer(), engine.card, PlainTemplate(), PlainGrammars())


def _script(request: Request) -> list[int]:
    """What the model says: JSON where a grammar asks for it, otherwise the prompt's tokens again."""
    grammar = request.params.grammar
    if grammar is None:
        return list(request.prompt_ids) if not request.params.ignore_eos else list(request.prompt_ids) or [65]
    return list(orjson.dumps(_instance(orjson.loads(grammar.source or "{}"))))


def _instance(schema: dict[str, Any]) -> Any:
    """A value that fits a simple schema."""
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _instance(schema["anyOf"][0])
    if schema.get("type") == "array":
        return [_instance(schema["items"])]
    if schema.get("type") in ("integer", "number"):
        return 7
    if schema.get("type") == "string":
        return "text"
    return {name: _instance(part) for name, part in schema.get("properties", {}).items()}


def _with_text(row: _Row, event: TokenEvent, token: int, params: SamplingParams) -> TokenEvent:
    """Adds the text that is certain, and the finish reason."""
    if token == EOS_ID and not params.ignore_eos:
        return replace(event, text=_rest(row), finish_reason=FinishReason.STOP)
    if token in params.stop_token_ids:
        return replace(event, text=_rest(row), finish_reason=FinishReason.STOP, stop_reason=token)
    row.data += bytes([token]) if token < EOS_ID else b""
    text = row.data.decode("utf-8", "ignore")
    for stop in params.stop:
        if (at := text.find(stop)) >= 0:
            end = at + len(stop) if params.include_stop_str_in_output else at
            return replace(
                event, text=text[row.num_sent : end], finish_reason=FinishReason.STOP, stop_reason=stop
            )
    if row.num_tokens >= params.max_tokens:
        return replace(event, text=_rest(row), finish_reason=FinishReason.LENGTH)
    held = max((n for s in params.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    certain = len(text) - held
    piece, row.num_sent = text[row.num_sent : certain], max(row.num_sent, certain)
    return replace(event, text=piece)


def _rest(row: _Row) -> str:
    return row.data.decode("utf-8", "replace")[row.num_sent :]


def _scores(ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprob, ...]:
    top = [tuple(((i + k) % 256, -0.25 - k) for k in range(num_top or 0)) for i in ids]
    return tuple(TokenLogprob(i, -0.25, best) for i, best in zip(ids, top, strict=True))


def _prompt_scores(row: _Row) -> tuple[TokenLogprob, ...]:
    num_top = row.request.params.prompt_logprobs
    if num_top is None:
        return ()
    return _scores(row.request.prompt_ids[1:], num_top)  # nothing predicts the first token
