"""One HTTP call's requests in the engine: events in, batches out, bounded while the client reads slowly.

All on the event loop's thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from starlette.types import Receive

from control_plane.errors import EngineFault, clean
from runtime.errors import DeadlineExceeded, InvalidRequest, QueueFull, RuntimeFault, Unavailable
from runtime.request import FinishReason, Request, TokenEvent

KEEP_ALIVE_S = 10.0
MAX_PENDING_TOKENS = 16384  # of one call; a client that reads slower than that loses it
MAX_PENDING_EVENTS = 256  # of one call whose client reads slowly; then events of one request are joined
_FAULTS: dict[str, type[RuntimeFault]] = {
    fault.code: fault for fault in (DeadlineExceeded, QueueFull, Unavailable, InvalidRequest)
}


class Call:
    """One HTTP call's requests in the engine. `batches` yields what has arrived, empty when nothing has for a while."""

    def __init__(
        self, requests: Sequence[Request], deadline_s: float | None, on_close: Callable[["Call"], None]
    ) -> None:
        self.request_ids = tuple(request.request_id for request in requests)
        self._on_close = on_close
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._open = set(self._index)
        self._pending: list[TokenEvent] = []
        self._num_pending_tokens = 0
        self._fault: RuntimeFault | None = None
        self._wake = asyncio.Event()
        self._deadline_s = deadline_s

    def take_open(self) -> list[str]:
        """Ids of the requests that have not finished; a second call finds none."""
        unfinished, self._open = list(self._open), set()
        return unfinished

    def close(self) -> None:
        """Aborts what is unfinished. May be called twice."""
        self._on_close(self)

    def push(self, event: TokenEvent) -> None:
        self._pending.append(event)
        self._num_pending_tokens += len(event.token_ids)
        if self._num_pending_tokens > MAX_PENDING_TOKENS:
            self._pending.clear()
            self.fail(EngineFault("The client reads too slowly."))
            self.close()
            return
        if len(self._pending) > MAX_PENDING_EVENTS:
            self._pending = list(_joined(self._pending))
        if event.finish_reason is not None:
            self._open.discard(event.request_id)
        self._wake.set()

    def fail(self, fault: RuntimeFault) -> None:
        self._fault = self._fault or fault
        self._wake.set()

    async def batches(self, tick_s: float = KEEP_ALIVE_S) -> AsyncIterator[list[tuple[int, TokenEvent]]]:
        """(choice index, event) until every request has finished. Raises the fault that ended one early."""
        num_left = len(self._index)
        while num_left:
            if not self._pending and self._fault is None:
                await self._wait(tick_s)
            self._wake.clear()
            events, self._pending, self._num_pending_tokens = self._pending, [], 0
            for event in events:
                _raise_if_failed(event)
                num_left -= event.finish_reason is not None
            yield [(self._index[event.request_id], event) for event in events]
            if self._fault is not None and num_left:
                raise self._fault

    async def _wait(self, tick_s: float) -> None:
        until = time.monotonic() + tick_s
        if self._deadline_s is not None:
            until = min(until, self._deadline_s)
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self.fail(DeadlineExceeded("The request did not finish before its deadline."))


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None after cancelling it because the client left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _raise_if_failed(event: TokenEvent) -> None:
    """An event's `error` reads `code: sentence`; codes that are not ours are engine errors."""
    if event.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
        return
    code, _, sentence = (event.error or "").partition(": ")
    if code in _FAULTS:
        raise _FAULTS[code](clean(sentence), retry_after_s=1)
    raise EngineFault(clean(event.error or "The request was aborted."))


def _joined(events: Sequence[TokenEvent]) -> Iterator[TokenEvent]:
    """The same news in one event for each request."""
    by_request: dict[str, list[TokenEvent]] = {}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    for request_id, group in by_request.items():
        yield TokenEvent(
            request_id,
            tuple(token for event in group for token in event.token_ids),
            "".join(event.text for event in group),
            tuple(entry for event in group for entry in event.logprobs),
            tuple(entry for event in group for entry in event.prompt_logprobs),
            group[-1].finish_reason,
            group[-1].stop_reason,
            max(event.num_cached_tokens for event in group),
            group[-1].error,
        )
