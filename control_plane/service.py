"""EngineService: the asyncio face of the engine. Requests in, batches of token events out, nothing left behind.

All methods run on the event loop's thread except `_publish`, which the engine's thread calls once for each step.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from control_plane.call import Call
from control_plane.call_names import CallNames
from control_plane.config_state import ConfigState, in_memory
from control_plane.console.sampler import Sampler
from control_plane.engine_handle import ServedModel
from control_plane.errors import EngineFault, ModelNotFound, clean
from control_plane.heartbeat import Heartbeat
from control_plane.live_config import LiveConfig
from control_plane.stored import StoredCompletions
from control_plane.text_work import TextWork
from runtime.config import EngineConfig
from runtime.engine.stats import EngineSnapshot
from runtime.errors import DeadlineExceeded, QueueFull, Unavailable
from runtime.request import Request, TokenEvent

WATCH_S = 1.0
TICK_S = 0.25
LOADING_RETRY_S = 5.0
log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Where the endpoint is in its life; it only moves down this list."""

    SERVING = "serving"
    LEAVING = "leaving"  # not ready any more, still admitting
    CLOSED = "closed"  # admits nothing, finishes what runs


class EngineService:
    """Holds the served model (None while it loads), the calls in flight and the phase of the endpoint's life.

    config: what is in force; replaced whole by every live change. live_config: None until the model is attached.
    state: where changes are kept; None: in memory.
    """

    def __init__(
        self, config: EngineConfig, *, stall_s: float = 30.0, state: ConfigState | None = None
    ) -> None:
        self.config = config
        self.state = state or in_memory(config)
        self.live_config: LiveConfig | None = None
        self.phase = Phase.SERVING
        self.stored = StoredCompletions()
        self.heartbeat = Heartbeat(stall_s)
        self.sampler = Sampler()
        self.call_names = CallNames()
        self._model: ServedModel | None = None
        self._text: TextWork | None = None
        self.load_error: str | None = None
        self._calls: dict[str, Call] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds the service to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._watch()), self._loop.create_task(self._tick())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._text is not None:
            self._text.close()
        self.state.close()

    def attach(self, model: ServedModel) -> None:
        """Gives the service its model. Any thread, once, before or after `start`."""
        model.engine.set_publisher(self._publish)
        self._text = TextWork(model, lambda: self.config.server.max_prompt_bytes)
        self.live_config = LiveConfig(model.engine, self.state, self._take_config)
        self._model = model
        if self.phase is Phase.CLOSED:
            model.engine.begin_drain()

    def fail_to_load(self, error: str) -> None:
        self.load_error = clean(error)

    def leave(self) -> None:
        """First step of a drain: readiness goes, admission stays."""
        self.phase = Phase.LEAVING

    def close_admission(self) -> None:
        self.phase = Phase.CLOSED
        if self._model is not None:
            self._model.engine.begin_drain()

    def cancel_all(self) -> None:
        """Ends every call with an error; their requests are aborted as the calls unwind."""
        for call in set(self._calls.values()):
            call.fail(Unavailable("The server is shutting down.", retry_after_s=1))

    @property
    def num_open(self) -> int:
        return len(self._calls)

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """The served model. Raises Unavailable while it loads or when it could not be loaded."""
        if self._model is None:
            raise self._not_loaded()
        return self._model

    @property
    def text(self) -> TextWork:
        if self._text is None:
            raise self._not_loaded()
        return self._text

    @property
    def live(self) -> LiveConfig:
        """What changes the configuration. Raises Unavailable while the model loads or when it could not be loaded."""
        if self.live_config is None:
            raise self._not_loaded()
        return self.live_config

    @property
    def snapshot(self) -> EngineSnapshot | None:
        return self._model.engine.snapshot() if self._model is not None else None

    @property
    def loaded_name(self) -> str:
        """Name of the model; empty while it loads."""
        return self._model.card.name if self._model is not None else ""

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model.card.name, *self.config.model.aliases)

    def require_model(self, name: str) -> None:
        if name not in self.model_names:
            raise ModelNotFound(f"The model {clean(name, 64)!r} does not exist.", param="model")

    def readiness(self) -> tuple[bool, str]:
        """Whether new requests should come here, and the state in a word."""
        if self.phase is not Phase.SERVING:
            return False, "draining"
        if self.load_error is not None:
            return False, "failed"
        snapshot = self.snapshot
        state = snapshot.state if snapshot is not None else "loading"
        return state == "ready", state

    def is_alive(self) -> bool:
        """False when the engine has failed or work is queued and no step has been made for `stall_s`."""
        snapshot = self.snapshot
        if snapshot is None:
            return self.load_error is None
        return snapshot.state != "failed" and self.heartbeat.observe(snapshot, self.num_open)

    # -- work ---------------------------------------------------------------------------------------------------

    def admit(self, timeout_s: float | None = None) -> float | None:
        """Checks that work may start; returns the deadline. Raises Unavailable, or DeadlineExceeded if hopeless."""
        if self.phase is Phase.CLOSED:
            raise Unavailable("The server is shutting down.", retry_after_s=self.config.server.drain_timeout)
        snapshot = self.model.engine.snapshot()
        if snapshot.state == "failed":
            raise Unavailable(_failure(snapshot), retry_after_s=60)
        if snapshot.state == "loading":
            raise Unavailable("The model is loading.", retry_after_s=LOADING_RETRY_S)
        if timeout_s is None:
            return None
        if snapshot.num_waiting and (wait_s := _queue_wait_s(snapshot)) is not None and wait_s > timeout_s:
            raise DeadlineExceeded("The queue is longer than the request's deadline.", retry_after_s=wait_s)
        return time.monotonic() + timeout_s

    def open(self, requests: Sequence[Request], deadline_s: float | None = None) -> Call:
        """Submits the requests. The caller must `close` the call, whatever happens."""
        if self.phase is Phase.CLOSED:
            raise Unavailable("The server is shutting down.", retry_after_s=self.config.server.drain_timeout)
        call = Call(requests, deadline_s, self._close)
        self._calls.update((request_id, call) for request_id in call.request_ids)
        try:
            self._submit(requests)
        except BaseException:
            self._forget(call)
            raise
        return call

    def _close(self, call: Call) -> None:
        self._forget(call)
        if unfinished := call.take_open():
            self.model.engine.abort(unfinished)

    def _forget(self, call: Call) -> None:
        for request_id in call.request_ids:
            self._calls.pop(request_id, None)

    def _submit(self, requests: Sequence[Request]) -> None:
        engine = self.model.engine
        try:
            engine.submit(requests)
        except (QueueFull, Unavailable) as fault:
            if fault.retry_after_s is None:
                fault.retry_after_s = _queue_wait_s(engine.snapshot())
            raise

    def _publish(self, events: list[TokenEvent]) -> None:
        """Called in the engine's thread: one hand-over for each step."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has ended, and with it everyone who would read this
                self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            call = self._calls.get(event.request_id)
            if call is not None:
                call.push(event)

    async def _watch(self) -> None:
        """Keeps the heartbeat's clock and ends the calls of an engine that has failed."""
        while True:
            await asyncio.sleep(WATCH_S)
            snapshot = self.snapshot
            if snapshot is None:
                continue
            self.heartbeat.observe(snapshot, self.num_open)
            if snapshot.state == "failed":
                for call in set(self._calls.values()):
                    call.fail(EngineFault(_failure(snapshot)))

    async def _tick(self) -> None:
        """Keeps the clock of the console's history and of what live changes wait for; a mistake is told and ends nothing."""
        while True:
            try:
                self.sampler.tick(self._model.engine if self._model is not None else None)
                if self.live_config is not None:
                    await self.live_config.tick()
            except Exception:
                log.exception("a tick failed")
            await asyncio.sleep(TICK_S)

    def _take_config(self, config: EngineConfig) -> None:
        self.config = config

    def _not_loaded(self) -> Unavailable:
        if self.load_error is not None:
            return Unavailable("The model could not be loaded.", retry_after_s=60)
        return Unavailable("The model is loading.", retry_after_s=LOADING_RETRY_S)


def _failure(snapshot: EngineSnapshot) -> str:
    """For everybody: a lost host is named; the engine's own error may hold what is nobody's business."""
    lost = next((host for host in snapshot.hosts if host.state == "gone"), None)
    if lost is None:
        return "The engine has failed."
    name = f"host {lost.host_id} of {len(snapshot.hosts)} ({lost.address})"
    return f"The engine has failed: {name} is gone: {lost.reason}."


def _queue_wait_s(snapshot: EngineSnapshot) -> float | None:
    """Seconds until what waits now is done at the measured rate; None when no rate is known."""
    if snapshot.drain_rate_tokens_s <= 0:
        return None
    return snapshot.waiting_tokens / snapshot.drain_rate_tokens_s
