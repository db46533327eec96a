"""HostChannel: messages between two hosts over one TCP connection, with beats so that silence is noticed. No JAX.

A host whose process ends closes its connection, which is seen at once; one that hangs falls silent, which is seen after
the timeout. Beats come from a thread of their own: a host that computes or compiles is not silent.
"""

import contextlib
import socket
import threading
import time
from typing import Any

from runtime.engine.host_frames import (
    HEADER,
    MAX_COMMAND_BYTES,
    BadFrame,
    body_len,
    from_body,
    printable,
    to_frame,
)
from runtime.errors import Unavailable

BEAT = "beat"
BEATS_PER_TIMEOUT = 4
MAX_DETAIL = 500
MIN_WAIT_S = 0.001
STANDSTILL_S = 1.0  # that a wait may last longer than asked for before it counts as one's own standstill


class HostGone(Unavailable):
    """Another host has ended, hangs or says what it may not. `detail` is what it said, for operators alone."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class HostChannel:
    """One end. `send` may be called by any thread, `receive` by one."""

    def __init__(
        self, connection: socket.socket, timeout_s: float, max_received: int, takes_arrays: bool = True
    ) -> None:
        """timeout_s: silence that is taken for the other's end. max_received: bytes of one message.

        takes_arrays: False where the other end has none to send.
        """
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s, self._max_received = connection, timeout_s, max_received
        self._takes_arrays = takes_arrays
        self._sending = threading.Lock()
        self._is_closed = threading.Event()
        self._heard_s = time.monotonic()
        self._beats = threading.Thread(target=self._beat, name="host-beats", daemon=True)

    def start_beats(self) -> None:
        """From now on the other end hears of this one, whatever its threads do. The first beat is sent here: HostGone."""
        self.send([BEAT])
        self._beats.start()

    @property
    def heard_s(self) -> float:
        """Seconds since the last sign of the other end."""
        return time.monotonic() - self._heard_s

    def send(self, message: list[Any]) -> None:
        """Raises HostGone when the connection has ended or the other end reads nothing for the timeout."""
        self.send_frame(to_frame(message, MAX_COMMAND_BYTES))

    def send_frame(self, frame: bytes) -> None:
        """A message that was made before, to be sent to several hosts."""
        try:
            with self._sending:
                self._socket.sendall(frame)
        except TimeoutError:
            raise HostGone(f"it has read nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise HostGone(f"connection closed{_detail(error)}") from None

    def send_last(self, message: list[Any], within_s: float) -> None:
        """Before `close`: given up, without an error, where the other end does not take it in about that time."""
        if self._sending.acquire(timeout=within_s):
            try:
                with contextlib.suppress(OSError):
                    self._socket.settimeout(within_s)
                    self._socket.sendall(to_frame(message))
            finally:
                self._sending.release()

    def receive(self) -> list[Any]:
        """The next message that is no beat. Raises HostGone: closed, silent for the timeout, or no message of ours."""
        while True:
            message = self._next(None)
            if message[0] != BEAT:
                return message

    def receive_within(self, limit_s: float) -> list[Any]:
        """The next message, a beat too, however slowly its bytes come. Raises HostGone."""
        try:
            return self._next(time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(self._timeout_s)

    def _next(self, deadline: float | None) -> list[Any]:
        try:
            length = body_len(self._read(HEADER.size, deadline), self._max_received)
            return from_body(self._read(length, deadline), self._takes_arrays)
        except BadFrame as error:
            raise HostGone("it sent what is no message", printable(error, MAX_DETAIL)) from None

    def close(self) -> None:
        """Idempotent; a `receive` that waits raises HostGone."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int, deadline: float | None) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            began_s = time.monotonic()
            try:
                if deadline is not None:
                    self._socket.settimeout(
                        min(self._timeout_s, max(MIN_WAIT_S, deadline - time.monotonic()))
                    )
                part = self._socket.recv(min(missing, 1 << 20))
            except TimeoutError:
                if deadline is None and time.monotonic() - began_s > self._timeout_s + STANDSTILL_S:
                    continue  # this process stood still, with its machine perhaps: it would have heard nothing
                is_late = deadline is not None and time.monotonic() >= deadline
                raise HostGone("too slow" if is_late else f"silent for {self._timeout_s:g} s") from None
            except OSError as error:
                raise HostGone(f"connection closed{_detail(error)}") from None
            if not part:
                raise HostGone("connection closed")
            if deadline is not None and time.monotonic() > deadline:
                raise HostGone("too slow")
            self._heard_s = time.monotonic()
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _beat(self) -> None:
        frame = to_frame([BEAT])
        while not self._is_closed.wait(self._timeout_s / BEATS_PER_TIMEOUT):
            if not self._sending.acquire(blocking=False):
                continue  # something is being sent, which is as good
            try:
                self._socket.sendall(frame)
            except OSError:
                return  # whoever receives is told
            finally:
                self._sending.release()


def _detail(error: OSError) -> str:
    return f" ({error.strerror})" if error.strerror else ""
