"""EngineClient: submits requests to an engine's loop in this process and notes when each token came. Imports no JAX.

Times are taken in the engine's own thread as it publishes, before any detour through HTTP or an event loop.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.engine.stats import EngineSnapshot
from runtime.errors import RuntimeFault
from runtime.request import FinishReason, Request, TokenEvent

_POLL_S = 0.5  # how often a waiter looks whether the engine still lives


class Loop(Protocol):
    """The part of the engine's loop that measuring needs."""

    def set_publisher(self, publish: Callable[[list[TokenEvent]], None], /) -> None: ...
    def submit(self, requests: Sequence[Request], /) -> None: ...
    def abort(self, request_ids: Sequence[str], /) -> None: ...
    def snapshot(self) -> EngineSnapshot: ...


@dataclass(slots=True)
class RequestTimes:
    """One request as its user saw it. An event brings one or more tokens; times are `time.monotonic()` seconds."""

    prompt_len: int
    arrival_s: float
    event_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.event_tokens)

    @property
    def ttft_s(self) -> float | None:
        """From arrival (not from admission) to the first token."""
        return self.event_s[0] - self.arrival_s if self.event_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between events: what a reader of the stream waits, several tokens at once counted as one wait."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first event."""
        num_later = self.num_tokens - self.event_tokens[0] if self.event_tokens else 0
        return (self.event_s[-1] - self.event_s[0]) / num_later if num_later else None

    @property
    def is_ok(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


class EngineClient:
    """The only publisher of a loop while it lives."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._times: dict[str, RequestTimes] = {}
        self._num_open = 0
        loop.set_publisher(self._publish)

    @property
    def num_open(self) -> int:
        """Requests submitted and not finished."""
        return self._num_open

    def submit(self, requests: Iterable[Request]) -> None:
        """Hand requests over; one that the engine refuses counts as finished with an error."""
        for request in requests:
            arrival_s = request.arrival_s or time.monotonic()
            with self._changed:
                self._times[request.request_id] = RequestTimes(len(request.prompt_ids), arrival_s)
                self._num_open += 1
            try:
                self._loop.submit([request])
            except RuntimeFault as fault:
                self._finish(request.request_id, FinishReason.ERROR, f"{fault.code}: {fault.message}")

    def wait(self, at_most_open: int = 0, timeout_s: float = 3600.0) -> None:
        """Until no more than `at_most_open` requests are unfinished. Raises if the engine fails or time runs out."""
        give_up_s = time.monotonic() + timeout_s
        with self._changed:
            while self._num_open > at_most_open:
                self._changed.wait(_POLL_S)
                if self._num_open <= at_most_open:
                    return
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"{self._num_open} requests unfinished after {timeout_s:g} s")
                snapshot = self._loop.snapshot()
                if snapshot.state == "failed":
                    raise RuntimeError(f"the engine failed: {snapshot.error}")

    def take(self) -> dict[str, RequestTimes]:
        """Everything noted since the last call, by request id; call it when nothing is open."""
        with self._changed:
            times, self._times = self._times, {}
        return times

    def _publish(self, events: list[TokenEvent]) -> None:
        """In the engine's thread, once a step."""
        now_s = time.monotonic()
        with self._changed:
            for event in events:
                times = self._times.get(event.request_id)
                if times is not None and event.token_ids:
                    times.event_s.append(now_s)
                    times.event_tokens.append(len(event.token_ids))
        for event in events:
            if event.finish_reason is not None:
                self._finish(event.request_id, event.finish_reason, event.error)

    def _finish(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        with self._changed:
            times = self._times.get(request_id)
            if times is None or times.finished_s is not None:
                return
            times.finished_s, times.finish_reason, times.error = time.monotonic(), reason, error
            self._num_open -= 1
            self._changed.notify_all()
