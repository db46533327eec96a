"""Limits on what a connection may send and how slowly: size of head and body, time to send them, time to read answers.

`BodyLimit` is ASGI; `BoundedHttpProtocol` sits below it because uvicorn parses the head before ASGI sees anything.
"""

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from control_plane.errors import status_response

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 20.0
BODY_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0  # a client that takes nothing for this long is gone
LINGER_S = 1.0
_CLOSE = {"Connection": "close"}


class BodyLimit:
    """ASGI middleware: reads the body within its limits, then hands it on whole, so that no route waits for bytes."""

    def __init__(self, app: ASGIApp, max_bytes: int, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS:
            await status_response(431, "The request has too many headers.", _CLOSE)(scope, receive, send)
        elif (length := headers.get(b"content-length")) is not None and not _fits(length, self._max_bytes):
            await self._refuse_size(scope, receive, send)
        elif length is None and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
        else:
            await self._with_body(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            await status_response(408, "The request body did not arrive in time.", _CLOSE)(
                scope, receive, send
            )
            return
        if body is None:
            await self._refuse_size(scope, receive, send)
            return
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal first
            if first is None:
                return await receive()
            message, first = first, None
            return message

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when it is over the limit, empty when the client left."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse_size(self, scope: Scope, receive: Receive, send: Send) -> None:
        """413 at once; what the client still sends is thrown away for a moment, for a reset could lose the answer."""
        text = f"The request body is larger than {self._max_bytes} bytes."

        async def keep_open(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await status_response(413, text, _CLOSE)(scope, receive, keep_open)
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _fits(content_length: bytes, limit: int) -> bool:
    return content_length.isdigit() and len(content_length) < 20 and int(content_length) <= limit


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head, on the time it takes to arrive, and on a reader that stalls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
            self._start_head_timer()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, "The request's head is too large.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self._in_head and (self._head_bytes or self.cycle is None) and not self.transport.is_closing():
            self._refuse(408, "The request did not arrive in time.")

    def _refuse(self, status: int, text: str) -> None:
        """Answers below ASGI and closes a moment later; nothing of an unfinished request reaches the app."""
        body = status_response(status, text).body
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + bytes(body))
        self._is_refused = True
        self.loop.call_later(LINGER_S, self.transport.close)
