"""RequestStreams: the requests in the engine with their text; from a step's tokens to the events of each.

Owned by the engine's thread. One request's trouble (a grammar, a text) ends that request with an error and no other.
"""

import logging
import time
from collections.abc import Iterable

import numpy as np

from runtime.config import SloConfig
from runtime.engine.admission import AdmissionGate
from runtime.engine.detokenizer import IncrementalDetokenizer
from runtime.engine.engine import CollectedStep
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.stats import EngineStats
from runtime.engine.stream import Stream
from runtime.engine.timelines import Timelines
from runtime.engine.tokenizer import Tokenizer
from runtime.errors import DeadlineExceeded, RuntimeFault
from runtime.request import FinishReason, Request, TokenEvent
from runtime.schedule.plan import StepPlan
from runtime.schedule.shards import AnyScheduler

log = logging.getLogger(__name__)


class RequestStreams:
    """The scheduler's sequences seen from outside. Every method returns the events to publish."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        stats: EngineStats,
        gate: AdmissionGate,
        timelines: Timelines,
    ) -> None:
        self._tokenizer, self._grammars, self._stats, self._gate = tokenizer, grammars, stats, gate
        self._timelines = timelines
        self._streams: dict[str, Stream] = {}
        self.slo = SloConfig()  # what is promised now; whoever configures the engine replaces it

    def add(self, scheduler: AnyScheduler, requests: Iterable[Request]) -> list[TokenEvent]:
        """Put requests in line; an event for each that could not be."""
        events: list[TokenEvent] = []
        for request in requests:
            params = request.params
            try:
                grammar = self._grammars.compile(params.grammar) if params.grammar else None
                sequence = scheduler.add(request)
            except Exception as error:
                fault = error if isinstance(error, RuntimeFault) else RuntimeFault("the request failed")
                if fault is not error:
                    log.exception("a request could not be added")
                self._stats.rejected[fault.code] += 1
                events.append(self.refuse(request, fault.code, fault.message))
                continue
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            self._streams[request.request_id] = Stream(sequence, detokenizer, grammar)
            self._timelines.start(sequence)
        return events

    def refuse(self, request: Request, code: str, message: str) -> TokenEvent:
        """The only event of a request that never got a stream."""
        self._gate.leave(request.request_id)
        return TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=f"{code}: {message}")

    def forget(self, scheduler: AnyScheduler, request_ids: Iterable[str]) -> None:
        """Nobody listens any more; unknown ids are fine."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self._gate.leave(request_id)
                scheduler.abort(request_id)
                self._on_finish(stream, FinishReason.ABORT)

    def expire(self, scheduler: AnyScheduler) -> list[TokenEvent]:
        """End what has waited beyond its deadline."""
        now, events = time.monotonic(), []
        for sequence in scheduler.expire(now):
            stream = self._streams.pop(sequence.request_id, None)
            self._gate.leave(sequence.request_id)
            if stream is not None:
                self._stats.rejected[DeadlineExceeded.code] += 1
                text = f"waited {now - sequence.request.arrival_s:.1f} s in the queue"
                self._timelines.finish(sequence, FinishReason.ERROR, now, text)
                events.append(stream.fail(DeadlineExceeded.code, text))
        return events

    def prepare(self, plan: StepPlan, now_s: float) -> dict[int, np.ndarray]:
        """What a plan needs before its launch: the grammar bit mask of each row that has one."""
        masks: dict[int, np.ndarray] = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            self._gate.leave(sequence.request_id)
            stream = self._streams.get(sequence.request_id)
            if stream is not None and stream.grammar is not None and chunk.samples:
                try:
                    masks[chunk.row] = stream.grammar.mask()
                except Exception:
                    log.exception("no mask for %s", sequence.request_id)
                    stream.trouble = "the constraint could not be followed"
        return masks

    def take(
        self, scheduler: AnyScheduler, plan: StepPlan, collected: CollectedStep, now_s: float
    ) -> list[TokenEvent]:
        """Hand a step's tokens to the scheduler and turn them into text."""
        events: list[TokenEvent] = []
        logprobs = {c.sequence.request_id: lp for c, lp in zip(plan.chunks, collected.logprobs, strict=True)}
        for request_id, scores in collected.prompt_logprobs.items():
            if stream := self._streams.get(request_id):
                stream.add_prompt_scores(scores.first, scores.logprobs)
        for sequence, tokens in scheduler.collect(plan, collected.result):
            stream = self._streams.get(sequence.request_id)
            if stream is None:
                continue
            stop_ids = sequence.request.params.all_stop_ids(self._tokenizer.eos_ids)
            try:
                event = stream.push(
                    tokens, logprobs.get(sequence.request_id, ()), sequence.finish_reason, stop_ids
                )
            except Exception:
                log.exception("the text of %s could not be made", sequence.request_id)
                event = stream.fail("internal_error", "the text could not be made")
            stream.observe(len(event.token_ids), now_s, self._stats)
            self._stats.generation_tokens += len(event.token_ids)
            events.append(event)
            if event.finish_reason is not None:
                if sequence.finish_reason is None:
                    scheduler.finish(sequence, event.finish_reason)
                del self._streams[sequence.request_id]
                self._on_finish(stream, event.finish_reason)
        return events

    def fail_all(self, code: str, message: str) -> list[TokenEvent]:
        """The engine ends: so does everything in it. Any thread, when the engine's own may never come back."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            self._gate.leave(stream.request_id)
            self._timelines.finish(stream.sequence, FinishReason.ERROR, time.monotonic(), message)
        return [stream.fail(code, message) for stream in streams]

    def _on_finish(self, stream: Stream, reason: FinishReason) -> None:
        sequence = stream.sequence
        num_prompt, num_generated = len(sequence.request.prompt_ids), len(sequence.output_ids)
        self._stats.on_finish(reason.value, num_prompt, num_generated)
        self._stats.prompt_tokens += num_prompt
        self._stats.cached_prompt_tokens += sequence.num_cached
        now = time.monotonic()
        self._stats.e2e_s.observe(now - sequence.request.arrival_s)
        if stream.first_token_s is not None:
            self._stats.decode_s.observe(now - stream.first_token_s)
        self._timelines.finish(sequence, reason.value, now)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._stats.on_promises(
                kept_ttft=stream.ttft_s <= self.slo.ttft, kept_itl=stream.tpot_s <= self.slo.itl
            )
