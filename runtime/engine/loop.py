"""EngineLoop: the thread that owns the engine. Others submit, abort and read snapshots; nobody else touches it.

One turn: take commands, adopt rungs that got ready, launch the next step, then read the step before it. All events
of a step are published in one call, in the engine's thread.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.config import EngineConfig
from runtime.engine.admission import AdmissionGate
from runtime.engine.commands import Abort, Call, Command, Stop, Submit
from runtime.engine.detokenizer import IncrementalDetokenizer
from runtime.engine.engine import CollectedStep, Engine, InFlightStep
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.snapshot import take_snapshot
from runtime.engine.stats import EngineSnapshot, EngineStats
from runtime.engine.stream import Stream
from runtime.engine.tokenizer import Tokenizer
from runtime.errors import DeadlineExceeded, RuntimeFault, Unavailable
from runtime.ladder.late_compiles import monitor
from runtime.request import FinishReason, Request, TokenEvent
from runtime.schedule.plan import Phase, StepPlan
from runtime.schedule.policy import limit_burst
from runtime.schedule.request_checks import ModelLimits
from runtime.schedule.scheduler import Scheduler

PIPELINE_DEPTH = 2  # launches in flight: step n+1 starts before step n is read
SNAPSHOT_PERIOD_S = 0.1
IDLE_WAIT_S = 0.05

log = logging.getLogger(__name__)

type Publisher = Callable[[list[TokenEvent]], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the loader hands to the loop's thread."""

    engine: Engine
    scheduler: Scheduler


class EngineLoop:
    """Thread-safe face of one engine. States: loading, ready, draining, failed, stopped."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        load: Callable[[], Loaded],
    ) -> None:
        self._config, self._limits, self._tokenizer, self._grammars = config, limits, tokenizer, grammars
        self._load = load
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stats = EngineStats()
        server = config.server
        self.gate = AdmissionGate(
            server.max_queued_requests, server.max_queued_tokens, lambda: self._snapshot.drain_rate_tokens_s
        )
        self._publish: Publisher = lambda events: None
        self._streams: dict[str, Stream] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._loaded: Loaded | None = None
        self._state, self._error = "loading", ""
        self._life = threading.Lock()  # held to submit and to end, so that no request falls in between
        self._first_ready, self._all_ready = threading.Event(), threading.Event()
        self._is_draining = False
        self._decode_step_s = 0.0  # a decode step of late, exponentially averaged
        self._device_free_s = 0.0  # when the device finished what was read last
        self._snapshot = take_snapshot(self._stats, None, self._state, self._error, self.gate)
        self._snapshot_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called from any thread -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return "draining" if self._state == "ready" and self._is_draining else self._state

    def start(self) -> None:
        self._thread.start()

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """End the thread; requests still running get an error event. False if it is still at it after the time."""
        self._commands.put(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait_ready(self, timeout_s: float) -> None:
        """Until the first rungs serve. Raises Unavailable after the time or when loading failed."""
        self._wait(self._first_ready, timeout_s)

    def wait_complete(self, timeout_s: float) -> None:
        """Until every rung serves or has failed. Raises Unavailable after the time or when loading failed."""
        self._wait(self._all_ready, timeout_s)

    def set_publisher(self, publish: Publisher) -> None:
        """`publish` is called in the engine's thread, once a step, with the events of all requests."""
        self._publish = publish

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all or none. Raises InvalidRequest, ContextTooLong, QueueFull or Unavailable."""
        for request in requests:
            self._limits.check(request, self._tokenizer.eos_ids)
        with self._life:
            if self.state != "ready":
                raise Unavailable(f"the engine is {self.state}", retry_after_s=5.0)
            self.gate.enter(requests)
            self._commands.put(Submit(tuple(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Idempotent; unknown ids are fine."""
        self._commands.put(Abort(tuple(request_ids)))

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine's thread between two steps."""
        self._commands.put(Call(function))

    def begin_drain(self) -> None:
        """No new requests from now on; the running ones go on."""
        self._is_draining = True

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        state = "stopped"
        try:
            self._loaded = self._load()
            self._loaded.engine.set_max_decode_steps(self._config.ladder.max_decode_steps)
            self._serve(self._loaded)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("the engine failed")
            self._error = f"{type(error).__name__}: {str(error)[:500]}"
            state = "failed"
        with self._life:
            self._state = state
        if self._loaded is not None:
            self._loaded.engine.compiler.shutdown()
        self._take_snapshot()
        self._first_ready.set()
        self._all_ready.set()
        self._fail_all("server_is_overloaded", f"the engine is {state}")

    def _serve(self, loaded: Loaded) -> None:
        engine, scheduler = loaded.engine, loaded.scheduler
        is_idle, was_busy = True, False
        while True:
            if not self._take_commands(scheduler, IDLE_WAIT_S if is_idle else 0.0):
                return
            self._adopt_rungs(engine)
            if self._state == "loading":
                continue
            self._expire(scheduler)
            plan = scheduler.schedule() if len(self._in_flight) < PIPELINE_DEPTH else None
            if plan is not None:
                self._in_flight.append(self._launch(engine, plan))
            if self._in_flight and (plan is None or len(self._in_flight) == PIPELINE_DEPTH):
                self._collect(engine, scheduler)
            is_idle = plan is None and not self._in_flight
            if is_idle and was_busy and scheduler.is_idle:
                self._check_integrity(scheduler)
            was_busy = not is_idle
            if is_idle or time.monotonic() - self._snapshot_s > SNAPSHOT_PERIOD_S:
                self._take_snapshot()

    def _take_commands(self, scheduler: Scheduler, wait_s: float) -> bool:
        """Handle what is queued, waiting a little when there is nothing else to do; False when told to stop."""
        while True:
            try:
                command = self._commands.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                return True
            wait_s = 0.0
            match command:
                case Submit(requests):
                    self._add(scheduler, requests)
                case Abort(request_ids):
                    for request_id in request_ids:
                        self._forget(scheduler, request_id)
                case Call(function):
                    try:
                        function()
                    except Exception:
                        log.exception("a call between two steps failed")
                case Stop():
                    return False

    def _check_integrity(self, scheduler: Scheduler) -> None:
        """Each time the work runs out. A mistake in the books is told, and serving goes on."""
        try:
            scheduler.check_integrity()
        except AssertionError:
            log.exception("the scheduler's books do not add up")

    def _add(self, scheduler: Scheduler, requests: tuple[Request, ...]) -> None:
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
                self.gate.leave(request.request_id)
                self._stats.rejected[fault.code] += 1
                text = f"{fault.code}: {fault.message}"
                events.append(TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=text))
                continue
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            self._streams[request.request_id] = Stream(sequence, detokenizer, grammar)
        if events:
            self._publish(events)

    def _forget(self, scheduler: Scheduler, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.gate.leave(request_id)
            scheduler.abort(request_id)
            self._on_finish(stream, FinishReason.ABORT)

    def _expire(self, scheduler: Scheduler) -> None:
        events = []
        for sequence in scheduler.expire(time.monotonic()):
            stream = self._streams.pop(sequence.request_id, None)
            self.gate.leave(sequence.request_id)
            if stream is not None:
                self._stats.rejected[DeadlineExceeded.code] += 1
                waited = time.monotonic() - sequence.request.arrival_s
                events.append(stream.fail(DeadlineExceeded.code, f"waited {waited:.1f} s in the queue"))
        if events:
            self._publish(events)

    def _launch(self, engine: Engine, plan: StepPlan) -> InFlightStep:
        start = time.monotonic()
        masks: dict[int, np.ndarray] = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = start
            self.gate.leave(sequence.request_id)
            stream = self._streams.get(sequence.request_id)
            if stream is not None and stream.grammar is not None and chunk.samples:
                try:
                    masks[chunk.row] = stream.grammar.mask()
                except Exception:  # one request's trouble is not everybody's
                    log.exception("no mask for %s", sequence.request_id)
                    stream.trouble = "the constraint could not be followed"
        step = engine.launch(plan, masks)
        self._stats.host_step_s.observe(time.monotonic() - start)
        return step

    def _collect(self, engine: Engine, scheduler: Scheduler) -> None:
        step = self._in_flight.popleft()
        collected = engine.collect(step)
        now = time.monotonic()
        self._count(step, collected, now)
        events: list[TokenEvent] = []
        logprobs = {
            c.sequence.request_id: lp for c, lp in zip(step.plan.chunks, collected.logprobs, strict=True)
        }
        for request_id, scores in collected.prompt_logprobs.items():
            if stream := self._streams.get(request_id):
                stream.add_prompt_scores(scores.first, scores.logprobs)
        for sequence, tokens in scheduler.collect(step.plan, collected.result):
            stream = self._streams.get(sequence.request_id)
            if stream is None:
                continue
            stop_ids = sequence.request.params.all_stop_ids(self._tokenizer.eos_ids)
            try:
                event = stream.push(
                    tokens, logprobs.get(sequence.request_id, ()), sequence.finish_reason, stop_ids
                )
            except Exception:  # one request's trouble is not everybody's
                log.exception("the text of %s could not be made", sequence.request_id)
                event = stream.fail("internal_error", "the text could not be made")
            stream.observe(len(event.token_ids), now, self._stats)
            self._stats.generation_tokens += len(event.token_ids)
            events.append(event)
            if event.finish_reason is not None:
                if sequence.finish_reason is None:
                    scheduler.finish(sequence, event.finish_reason)
                del self._streams[sequence.request_id]
                self._on_finish(stream, event.finish_reason)
        if events:
            self._publish(events)

    def _count(self, step: InFlightStep, collected: CollectedStep, now: float) -> None:
        busy_s = now - max(step.launched_s, self._device_free_s)
        self._device_free_s = now
        if step.plan.phase is Phase.PREFILL:
            real, computed = step.plan.num_tokens, step.bucket.tokens
        else:
            real = sum(map(len, collected.result.token_ids))
            computed = step.bucket.tokens * collected.num_steps
            self._limit_burst(busy_s / max(1, collected.num_steps))
        self._stats.on_step(step.bucket.name, real, computed, busy_s)
        self._stats.on_experts(collected.expert_tokens)

    def _limit_burst(self, step_s: float) -> None:
        self._decode_step_s += (step_s - self._decode_step_s) * (0.1 if self._decode_step_s else 1.0)
        assert self._loaded is not None
        steps = limit_burst(self._config.ladder.max_decode_steps, self._decode_step_s, self._config.slo.itl)
        self._loaded.engine.set_max_decode_steps(steps)

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

    def _adopt_rungs(self, engine: Engine) -> None:
        if self._all_ready.is_set():
            return
        is_complete = engine.adopt_ready_rungs()
        if self._state == "loading" and engine.can_serve:
            monitor.arm()
            self._state = "ready"
            self._take_snapshot()
            self._first_ready.set()
        if is_complete:
            self._take_snapshot()
            self._all_ready.set()
            if self._state == "loading":
                raise Unavailable("no rung could be compiled: " + engine.compiler.first_error)

    def _fail_all(self, code: str, message: str) -> None:
        events = [stream.fail(code, message) for stream in self._streams.values()]
        for stream in self._streams.values():
            self.gate.leave(stream.request_id)
        self._streams.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Submit):
                for request in command.requests:
                    self.gate.leave(request.request_id)
                    text = f"{code}: {message}"
                    events.append(
                        TokenEvent(request.request_id, finish_reason=FinishReason.ERROR, error=text)
                    )
        if events:
            self._publish(events)

    def _take_snapshot(self) -> None:
        self._snapshot = take_snapshot(self._stats, self._loaded, self.state, self._error, self.gate)
        self._snapshot_s = time.monotonic()

    def _wait(self, event: threading.Event, timeout_s: float) -> None:
        if not event.wait(timeout_s):
            raise Unavailable(f"the engine is still {self.state} after {timeout_s:g} s")
        if self._state == "failed":
            raise Unavailable(f"the engine failed: {self._error}")
