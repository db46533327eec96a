"""Leader: host 0's end of an engine that spans several hosts. It gathers the others, commands them, and notices their end.

    follower:  hello, host id, greeting          leader:  welcome, configuration  (or refused, why)
               a beat: now it is taken in
               number, n                                  number, n of all
               compiled, step, error                      a command, a command, ...
               failed, why                                stop, why

No JAX. The engine's thread sends; a thread for each connection greets, and listens to the host that it turns out to be.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from runtime.config import ParallelConfig
from runtime.engine.device_commands import DeviceCommand, to_message
from runtime.engine.host_channel import BEAT, HostChannel, HostGone
from runtime.engine.host_frames import MAX_REPORT_BYTES, printable, to_frame
from runtime.engine.host_greeting import differences
from runtime.engine.host_status import HostStatus
from runtime.errors import ModelLoadError
from runtime.ladder.host_rungs import HostRungs

HELLO_TIMEOUT_S = 5.0
ACCEPT_S = 0.25
STOP_TIMEOUT_S = 0.5
MAX_GREETINGS = 32  # at once
MAX_TEXT = 500
log = logging.getLogger(__name__)


class Hosts(Protocol):
    """What the engine's loop asks of the other hosts."""

    trouble: str

    def on_gone(self, tell: Callable[[str], None]) -> None: ...
    def await_trouble(self, timeout_s: float) -> str: ...
    def status(self) -> tuple[HostStatus, ...]: ...
    def close(self, reason: str) -> None: ...


class NoHosts:
    """Where one process has all devices: nobody to lose, nobody to tell."""

    trouble = ""

    def on_gone(self, tell: Callable[[str], None]) -> None:
        """Never calls it."""

    def await_trouble(self, timeout_s: float) -> str:
        return ""

    def status(self) -> tuple[HostStatus, ...]:
        return ()

    def close(self, reason: str) -> None:
        """Nothing to close."""


NO_HOSTS = NoHosts()


class Leader:
    """`trouble` is empty while all hosts are well; after the first loss it names the host, and nothing works any more."""

    def __init__(self, parallel: ParallelConfig, greeting: dict[str, Any], sections: dict[str, Any]) -> None:
        """greeting: what all hosts must have in common. sections: of the configuration, for the others."""
        self._parallel, self._greeting, self._sections = parallel, greeting, sections
        host_ids = range(1, parallel.hosts)
        self.rungs = HostRungs(host_ids)
        self.trouble = ""
        self._channels: dict[int, HostChannel] = {}
        self._addresses: dict[int, str] = {}
        self._reasons: dict[int, tuple[str, str]] = {}  # of lost hosts: for everybody, for operators
        self._detail = ""  # of this host's own end
        self._refusal = ""
        self._greetings = threading.BoundedSemaphore(MAX_GREETINGS)
        self._numbers: dict[int, queue.SimpleQueue[int]] = {host: queue.SimpleQueue() for host in host_ids}
        self._is_lost = threading.Event()
        self._life = threading.Lock()
        self._is_closed = False
        self._on_gone: Callable[[str], None] = lambda trouble: None

    def on_gone(self, tell: Callable[[str], None]) -> None:
        """`tell` is called once, in a thread of the leader's, when the first host is lost."""
        self._on_gone = tell

    def gather(self) -> None:
        """Wait until all hosts have come. Raises ModelLoadError after parallel.host_start_timeout."""
        host, port = self._parallel.command_address
        if not _is_loopback(host):
            log.warning("hosts are awaited on %s, which is not loopback: its network must be trusted", host)
        deadline = time.monotonic() + self._parallel.host_start_timeout
        with _listen(host, port) as listener:
            listener.settimeout(ACCEPT_S)
            while missing := [h for h in range(1, self._parallel.hosts) if h not in self._channels]:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise ModelLoadError(self._missing_text(missing), param="parallel.hosts")
                self._accept(listener)
        self._check_alive()

    def send(self, command: DeviceCommand) -> None:
        """To all hosts, in the order of the calls; the engine's thread only. Raises HostGone."""
        if self.trouble:
            raise HostGone(self.trouble)
        frame = to_frame(to_message(command))
        for host_id, channel in self._channels.items():
            try:
                channel.send_frame(frame)
            except HostGone as gone:
                self._lose(host_id, gone)
                raise HostGone(self.trouble) from None

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all hosts say, which each of them gets. Raises HostGone."""
        for numbers in self._numbers.values():
            while True:
                with contextlib.suppress(queue.Empty):
                    number = min(number, numbers.get(timeout=0.05))
                    break
                if self._is_lost.is_set():
                    raise HostGone(self.trouble)
        for channel in self._channels.values():
            channel.send(["number", number])
        return number

    def give_up(self, error: str) -> None:
        """This host cannot go on; the others are told. error: for operators alone."""
        self._detail = error
        try:
            self._tell_gone(f"host 0 of {self._parallel.hosts} has failed", error)
        finally:
            self.close(error)

    def await_trouble(self, timeout_s: float) -> str:
        """What became of the other hosts, when a step has failed: the loss of one may be noticed a little later."""
        self._is_lost.wait(timeout_s)
        return self.trouble

    def status(self) -> tuple[HostStatus, ...]:
        """Of all hosts, this one included."""
        lead = HostStatus(0, "{}:{}".format(*self._parallel.command_address), "up", 0.0, detail=self._detail)
        return (lead, *(self._status_of(host) for host in range(1, self._parallel.hosts)))

    def close(self, reason: str) -> None:
        """Tell the others to end; idempotent. A host that takes nothing holds it up for about a second."""
        with self._life:
            if self._is_closed:
                return
            self._is_closed = True
            channels = list(self._channels.items())
        for host_id, channel in channels:
            if host_id not in self._reasons:
                channel.send_last(["stop", reason[:MAX_TEXT]], STOP_TIMEOUT_S)
            channel.close()

    def _status_of(self, host_id: int) -> HostStatus:
        channel, address = self._channels.get(host_id), self._addresses.get(host_id, "")
        if channel is None:
            return HostStatus(host_id, address, "waiting")
        is_lost = host_id in self._reasons
        state = "gone" if is_lost else "ended" if self._is_closed else "up"
        return HostStatus(host_id, address, state, round(channel.heard_s, 3), *self._reasons.get(host_id, ()))

    def _check_alive(self) -> None:
        if self._is_closed or self.trouble:
            raise ModelLoadError(self.trouble or "the server ends", param="parallel.hosts")

    def _accept(self, listener: socket.socket) -> None:
        """One connection, or none. Each is greeted in a thread of its own: who says nothing holds up nobody."""
        if not self._greetings.acquire(timeout=ACCEPT_S):
            return
        try:
            connection, address = listener.accept()
        except OSError:  # none within ACCEPT_S, or one that is gone again
            self._greetings.release()
            return
        greeting = partial(self._greet_and_listen, connection, f"{address[0]}:{address[1]}")
        threading.Thread(target=greeting, name="host-greeting", daemon=True).start()

    def _greet_and_listen(self, connection: socket.socket, address: str) -> None:
        channel = HostChannel(connection, self._parallel.host_timeout, MAX_REPORT_BYTES, takes_arrays=False)
        try:
            host_id = self._greet(channel, address)
        except Exception as error:  # whatever a stranger sends, others must be able to come
            channel.close()
            detail = getattr(error, "detail", "")
            why = f"{error}: {detail}" if detail else str(error)
            self._refusal = f"; the last that tried, from {address.rpartition(':')[0]}, was refused: {why}"
            log.warning("a host was refused, from %s: %s", address, why)
            return
        finally:
            self._greetings.release()
        log.info("host %d of %d has come, from %s", host_id, self._parallel.hosts, address)
        self._listen_to(host_id, channel)

    def _greet(self, channel: HostChannel, address: str) -> int:
        """Take a host in, and its number. Raises HostGone where it is none, slow, or gone before its first beat."""
        message = channel.receive_within(HELLO_TIMEOUT_S)
        if why := self._judge(message):
            channel.send_last(["refused", why], STOP_TIMEOUT_S)
            raise HostGone(why)
        channel.send(["welcome", self._sections])
        channel.start_beats()
        if channel.receive_within(HELLO_TIMEOUT_S)[0] != BEAT:
            raise HostGone("it sent no beat")
        host_id: int = message[1]
        with self._life:
            if self._is_closed:
                raise HostGone("the server ends")
            if host_id in self._channels:
                raise HostGone(f"host {host_id} is already here, from {self._addresses[host_id]}")
            self._addresses[host_id] = address
            self._channels[host_id] = channel
        return host_id

    def _judge(self, message: list[Any]) -> str:
        if message[0] != "hello" or len(message) != 3 or type(message[1]) is not int:
            return "its first message is no hello"
        host_id = message[1]
        if not 0 < host_id < self._parallel.hosts:
            return f"parallel.host_id is {str(host_id)[:20]}; 1 to {self._parallel.hosts - 1} are allowed"
        if host_id in self._channels:
            return f"host {host_id} is already here, from {self._addresses[host_id]}"
        return differences(self._greeting, message[2], host_id)

    def _listen_to(self, host_id: int, channel: HostChannel) -> None:
        try:
            while True:
                match channel.receive():
                    case ["number", int(number)]:
                        self._numbers[host_id].put(number)
                    case ["compiled", str(name), str(error)]:
                        self.rungs.report(host_id, name, printable(error, MAX_TEXT))
                    case ["failed", str(why)]:
                        raise HostGone("it has failed", printable(why, MAX_TEXT))
                    case message:
                        raise HostGone("it sent what is not known", printable(message[0], 40))
        except HostGone as gone:
            self._lose(host_id, gone)

    def _lose(self, host_id: int, gone: HostGone) -> None:
        """A host is gone: everybody here is told, and the others, which would wait for it in their steps."""
        if self._is_closed:
            return
        self._reasons[host_id] = (gone.message, gone.detail)
        num, address = self._parallel.hosts, self._addresses[host_id]
        try:
            self._tell_gone(f"host {host_id} of {num} ({address}) is gone: {gone.message}", gone.detail)
        finally:
            self.close(self.trouble)

    def _tell_gone(self, trouble: str, detail: str) -> None:
        with self._life:
            if self._is_closed or self._is_lost.is_set():
                return
            self.trouble = trouble
            self._is_lost.set()
        log.error("%s%s", trouble, f": {detail}" if detail else "")
        self._on_gone(trouble)

    def _missing_text(self, missing: list[int]) -> str:
        names = ", ".join(map(str, missing[:10]))
        return (
            f"host {names} of {self._parallel.hosts} has not come within parallel.host_start_timeout of "
            f"{self._parallel.host_start_timeout:g} s{self._refusal}"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int) -> socket.socket:
    """Raises ModelLoadError where the address is not this machine's or taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ModelLoadError(
            f"parallel.coordinator: host 0 cannot listen on {host}:{port}: {error.strerror or error}",
            param="parallel.coordinator",
        ) from None
