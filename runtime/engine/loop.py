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
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from runtime.adaptive.decision import Decision, DecisionLog
from runtime.config import EngineConfig
from runtime.engine.admission import AdmissionGate
from runtime.engine.change import Applied, ConfigChange
from runtime.engine.commands import Abort, Call, Command, Configure, MoveExperts, Stop, Submit
from runtime.engine.engine import Engine, InFlightStep
from runtime.engine.expert_status import ExpertAnswer, ExpertOrder
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.leader import NO_HOSTS, Hosts
from runtime.engine.loaded import Loaded
from runtime.engine.reconfigure import plan_change, with_restart_fields_of
from runtime.engine.request_streams import RequestStreams
from runtime.engine.snapshot import take_snapshot
from runtime.engine.start_checks import check_next_start
from runtime.engine.stats import EngineSnapshot, EngineStats
from runtime.engine.steering import Steering, estimate_cost
from runtime.engine.step_counts import count_step
from runtime.engine.timelines import Timelines
from runtime.engine.tokenizer import Tokenizer
from runtime.errors import Unavailable
from runtime.ladder.late_compiles import monitor
from runtime.request import Request, TokenEvent
from runtime.schedule.plan import StepPlan
from runtime.schedule.request_checks import ModelLimits
from runtime.schedule.shards import AnyScheduler

PIPELINE_DEPTH = 2  # launches in flight: step n+1 starts before step n is read
SNAPSHOT_PERIOD_S = 0.1
IDLE_WAIT_S = 0.05
LOST_TIMEOUT_S = 1.0  # for the engine's thread when another host is gone: it may wait for it for ever

log = logging.getLogger(__name__)

type Publisher = Callable[[list[TokenEvent]], None]


class EngineLoop:
    """Thread-safe face of one engine. States: loading, ready, draining, failed, stopped."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        load: Callable[[], Loaded],
        hosts: Hosts = NO_HOSTS,
    ) -> None:
        """hosts: the Leader of an engine that spans several; `load` gathers them."""
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._load, self._hosts = load, hosts
        hosts.on_gone(self._lose)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stats = EngineStats()
        self._decisions = DecisionLog(config.controller.decisions_kept)
        server = config.server
        self.gate = AdmissionGate(
            server.max_queued_requests, server.max_queued_tokens, lambda: self._snapshot.drain_rate_tokens_s
        )
        self._publish: Publisher = lambda events: None
        self.timelines = Timelines()
        self._streams = RequestStreams(tokenizer, grammars, self._stats, self.gate, self.timelines)
        self._observe_as(config)
        self._in_flight: deque[InFlightStep] = deque()
        self._loaded: Loaded | None = None
        self._steering: Steering | None = None
        self._state, self._error = "loading", ""
        self._life = threading.Lock()  # held to submit and to end, so that no request falls in between
        self._first_ready, self._all_ready = threading.Event(), threading.Event()
        self._is_draining = False
        self._device_free_s = 0.0  # when the device finished what was read last
        self._snapshot_s = 0.0
        self._take_snapshot()
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
        if self._state == "loading":
            self._hosts.close("the server ends")
        if self._thread.is_alive():
            self._thread.join(min(timeout_s, LOST_TIMEOUT_S) if self._hosts.trouble else timeout_s)
        self._hosts.close("the server ends")
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
                raise Unavailable(self._refusal(), retry_after_s=5.0)
            self.gate.enter(requests)
            self._commands.put(Submit(tuple(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Idempotent; unknown ids are fine."""
        self._commands.put(Abort(tuple(request_ids)))

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine's thread between two steps."""
        self._commands.put(Call(function))

    @property
    def config(self) -> EngineConfig:
        """The configuration in force."""
        return self._steering.config if self._steering is not None else self._config

    def plan(self, config: EngineConfig, must_start: bool = True) -> ConfigChange:
        """What `configure` would do. Raises InvalidRequest where it cannot or, if `must_start`, no start could; Unavailable."""
        loaded, steering = self._require_steering()
        return plan_change(
            steering.config,
            config,
            loaded.engine.ladder,
            steering.envelope,
            lambda bucket: estimate_cost(loaded.engine, bucket),
            partial(check_next_start, arch=loaded.engine.arch),
            must_start,
        )

    def configure(self, config: EngineConfig) -> Future[Applied]:
        """Take over the `live` fields before the next step and compile missing rungs in the background.

        Fields of kind `restart` are ignored. Raises as `plan` does where a start need not be possible.
        """
        self.plan(config, must_start=False)
        done: Future[Applied] = Future()
        with self._life:
            if self._state != "ready":
                raise Unavailable(self._refusal(), retry_after_s=5.0)
            self._commands.put(Configure(config, time.monotonic(), done))
        return done

    def order_experts(self, order: ExpertOrder) -> Future[ExpertAnswer]:
        """Carry out an operator's order between two steps; moves that it asks for follow, a few a step.

        Raises InvalidRequest on one device; the future does where the order does not fit.
        """
        _, steering = self._require_steering()
        balancing = steering.require_balancing()
        done: Future[ExpertAnswer] = Future()
        with self._life:
            if self._state != "ready":
                raise Unavailable(self._refusal(), retry_after_s=5.0)
            self._commands.put(MoveExperts(order, balancing.carry_out, done))
        return done

    def restrict_rungs(self, decode_rows: int | None) -> None:
        """Use one decode rung only, as a server with a fixed batch size would; None: all (measurements)."""
        loaded, _ = self._require_steering()
        self.call(lambda: loaded.engine.restrict_decode(decode_rows))

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        """The controllers' decisions with numbers above `after`, oldest first."""
        return self._decisions.after(after, limit)

    def decision_counts(self) -> dict[tuple[str, str], int]:
        """Decisions since the start by (controller, reason)."""
        return self._decisions.counts

    def begin_drain(self) -> None:
        """No new requests from now on; the running ones go on."""
        self._is_draining = True

    def snapshot(self) -> EngineSnapshot:
        hosts = self._hosts.status()
        return replace(self._snapshot, hosts=hosts) if hosts else self._snapshot

    def _lose(self, trouble: str) -> None:
        """Another host is gone, says a thread of the leader's. The engine's own may wait for it in a step that never ends,
        so that everything is ended from here."""
        with self._life:
            if self._state in ("failed", "stopped"):
                return
            self._state, self._error = "failed", trouble
        self._snapshot = replace(self._snapshot, state="failed", error=trouble)
        self._first_ready.set()
        self._all_ready.set()
        self._fail_all(Unavailable.code, self._refusal())

    def _refusal(self) -> str:
        """Why nothing is taken in now; a lost host is named."""
        return f"the engine is {self.state}" + (f": {self._hosts.trouble}" if self._hosts.trouble else "")

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        state = "stopped"
        try:
            self._loaded = loaded = self._load()
            parts = loaded.engine, loaded.scheduler, self._stats, self.gate, self._decisions
            self._steering = Steering(self._config, *parts, mover=loaded.mover, residency=loaded.residency)
            self._serve(loaded, self._steering)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("the engine failed")
            trouble = self._hosts.await_trouble(LOST_TIMEOUT_S)
            self._error = trouble or f"{type(error).__name__}: {str(error)[:500]}"
            state = "failed"
        self._hosts.close(f"the engine is {state}" + (f": {self._error}" if self._error else ""))
        with self._life:
            if self._state != "failed":
                self._state = state
        if self._loaded is not None:
            self._loaded.engine.shutdown(waits=state == "stopped" and self._hosts is NO_HOSTS)
        self._take_snapshot()
        self._first_ready.set()
        self._all_ready.set()
        self._fail_all(Unavailable.code, self._refusal())

    def _serve(self, loaded: Loaded, steering: Steering) -> None:
        engine, scheduler = loaded.engine, loaded.scheduler
        is_idle, was_busy = True, False
        while True:
            wait_s = IDLE_WAIT_S if is_idle and not steering.is_planning else 0.0
            if not self._take_commands(scheduler, wait_s) or self._state == "failed":
                return
            self._adopt_rungs(engine)
            if self._state == "loading":
                continue
            steering.turn(time.monotonic())
            self._publish_some(self._streams.expire(scheduler))
            plan = self._schedule(scheduler) if len(self._in_flight) < PIPELINE_DEPTH else None
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

    def _take_commands(self, scheduler: AnyScheduler, wait_s: float) -> bool:
        """Handle what is queued, waiting a little when there is nothing else to do; False when told to stop."""
        while wait_s > 0 or not self._commands.empty():  # asked first: to find nothing costs an exception
            try:
                command = self._commands.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                return True
            wait_s = 0.0
            match command:
                case Submit(requests):
                    self._publish_some(self._streams.add(scheduler, requests))
                case Abort(request_ids):
                    self._streams.forget(scheduler, request_ids)
                case Call() | MoveExperts():
                    command.run()
                case Configure():
                    self._configure(command)
                case Stop():
                    return False
        return True

    def _configure(self, command: Configure) -> None:
        if not command.done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        _, steering = self._require_steering()
        try:
            change = steering.configure(with_restart_fields_of(steering.config, command.config))
        except Exception as error:
            command.done.set_exception(error)
            return
        self._observe_as(steering.config)
        self._take_snapshot()
        command.done.set_result(Applied(self._stats.num_steps, time.monotonic() - command.ordered_s, change))

    def _observe_as(self, config: EngineConfig) -> None:
        """What the configuration says about watching requests."""
        self._streams.slo = config.slo
        self.timelines.switch(config.console.request_timeline)

    def _schedule(self, scheduler: AnyScheduler) -> StepPlan | None:
        plan = scheduler.schedule()
        self.timelines.on_preemptions(scheduler.num_preemptions, time.monotonic())
        return plan

    def _check_integrity(self, scheduler: AnyScheduler) -> None:
        """Each time the work runs out. A mistake in the books is told, and serving goes on."""
        try:
            scheduler.check_integrity()
        except AssertionError:
            log.exception("the scheduler's books do not add up")

    def _launch(self, engine: Engine, plan: StepPlan) -> InFlightStep:
        start = time.monotonic()
        step = engine.launch(plan, self._streams.prepare(plan, start))
        self._stats.host_step_s.observe(time.monotonic() - start)
        return step

    def _collect(self, engine: Engine, scheduler: AnyScheduler) -> None:
        step = self._in_flight.popleft()
        collected = engine.collect(step)
        now = time.monotonic()
        busy_s = now - max(step.launched_s, self._device_free_s)
        self._device_free_s = now
        count_step(self._stats, self._steering, step, collected, busy_s)
        token_ids = collected.result.token_ids
        self.timelines.on_step(step.plan, step.bucket.name, step.launched_s, now, token_ids)
        self._publish_some(self._streams.take(scheduler, step.plan, collected, now))

    def _publish_some(self, events: list[TokenEvent]) -> None:
        if events and self._state != "failed":  # or its requests have been ended already
            self._publish(events)

    def _adopt_rungs(self, engine: Engine) -> None:
        if self._all_ready.is_set():
            return
        is_complete = engine.adopt_ready_rungs()
        if self._state == "loading" and engine.can_serve:
            monitor.arm()
            with self._life:
                if self._state == "failed":  # another host was lost meanwhile
                    return
                self._state = "ready"
            self._take_snapshot()
            self._first_ready.set()
        if is_complete:
            self._take_snapshot()
            self._all_ready.set()
            if self._state == "loading":
                raise Unavailable("no rung could be compiled: " + engine.compiler.first_error)

    def _fail_all(self, code: str, message: str) -> None:
        """Requests first, then who waits for an order."""
        events = self._streams.fail_all(code, message)
        orders: list[Configure | MoveExperts] = []
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Configure | MoveExperts):
                orders.append(command)
            elif isinstance(command, Submit):
                events += [self._streams.refuse(request, code, message) for request in command.requests]
        if events:
            self._publish(events)
        for order in orders:
            order.refuse(Unavailable(message))
        if self._steering is not None and self._steering.balancing is not None:
            self._steering.balancing.fail_orders(Unavailable(message))

    def _take_snapshot(self) -> None:
        self._snapshot = take_snapshot(
            self._stats, self._loaded, self.state, self._error, self.gate, self._steering
        )
        self._snapshot_s = time.monotonic()

    def _require_steering(self) -> tuple[Loaded, Steering]:
        if self._loaded is None or self._steering is None or self._state not in ("ready", "draining"):
            raise Unavailable(self._refusal(), retry_after_s=5.0)
        return self._loaded, self._steering

    def _wait(self, event: threading.Event, timeout_s: float) -> None:
        if not event.wait(timeout_s):
            raise Unavailable(f"the engine is still {self.state} after {timeout_s:g} s")
        if self._state == "failed":
            raise Unavailable(f"the engine failed: {self._error}")
