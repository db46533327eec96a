"""Server-sent events: framing, and a response that always ends with [DONE] and frees the request when the client goes."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import anyio
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from control_plane.errors import EngineFault, fault_body
from runtime.errors import RuntimeFault

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Closes(Protocol):
    """What a stream holds in the engine."""

    def close(self) -> None: ...


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStreamResponse(Response):
    """ASGI response over `chunks`, an async generator of frames, which is closed on every way out.

    A RuntimeFault after the status line becomes an error event: a stream that fails never looks like a short success.
    """

    def __init__(
        self, chunks: AsyncGenerator[bytes], call: Closes | None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks = chunks
        self._call = call  # a generator that was never started would not run its own `finally`
        self.background = None
        extra = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
        self.raw_headers = [*_HEADERS, *extra]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_on_disconnect, receive, tasks.cancel_scope)
                await self._stream(send)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._chunks.aclose()
            if self._call is not None:
                self._call.close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RuntimeFault as fault:
            await send({"type": "http.response.body", "body": frame(fault_body(fault)), "more_body": True})
        except OSError:
            raise  # the client, not the engine
        except Exception:
            fault = EngineFault("The stream failed.")
            await send({"type": "http.response.body", "body": frame(fault_body(fault)), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    @staticmethod
    async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
