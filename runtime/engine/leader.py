"""Leader: host 0's end of an engine that spans several hosts. It gathers the others, commands them, and notices their end.

    follower:  hello, host id, greeting          leader:  welcome, configuration  (or refused, why)
               number, n                                  number, n of all
               compiled, step, error                      a command, a command, ...
               failed, why                                stop, why

No JAX. The engine's thread sends; a thread for each host listens.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from runtime.config import ParallelConfig
from runtime.engine.device_commands import DeviceCommand, to_message
from runtime.engine.host_channel import HostChannel, HostGone
from runtime.engine.host_frames import MAX_REPORT_BYTES, to_frame
from runtime.engine.host_greeting import differences
from runtime.engine.host_status import HostStatus
from runtime.errors import ModelLoadError
from runtime.ladder.host_rungs import HostRungs

HELLO_TIMEOUT_S = 5.0
ACCEPT_S = 0.25
MAX_TEXT = 500
log = logging.getLogger(__name__)


class Alone:
    """What Leader is where one process has all devices: nobody to lose, nobody to tell."""

    trouble = ""

    def on_gone(self, tell: Callable[[str], None]) -> None:
        """Never calls it."""

    def await_trouble(self, timeout_s: float) -> str:
        return ""

    def status(self) -> tuple[HostStatus, ...]:
        return ()

    def close(self, reason: str) -> None:
        """Nothing to close."""


ALONE = Alone()


class Leader(Alone):
    """`trouble` is empty while all hosts are well; after the first loss it names the host, and nothing works any more."""

    def __init__(self, parallel: ParallelConfig, greeting: dict[str, Any], sections: dict[str, Any]) -> None:
        """greeting: what all hosts must have in common. sections: of the configuration, for the others."""
        self._parallel, self._greeting, self._sections = parallel, greeting, sections
        host_ids = range(1, parallel.hosts)
        self.rungs = HostRungs(host_ids)
        self.trouble = ""
        self._channels: dict[int, HostChannel] = {}
        self._addresses: dict[int, str] = {}
        self._numbers: dict[int, queue.SimpleQueue[int]] = {host: queue.SimpleQueue() for host in host_ids}
        self._is_lost = threading.Event()
        self._lost_ids: set[int] = set()
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
        refusal = ""
        with _listen(host, port) as listener:
            while missing := [h for h in range(1, self._parallel.hosts) if h not in self._channels]:
                if self._is_closed or self.trouble:
                    raise ModelLoadError(self.trouble or "the server ends", param="parallel.hosts")
                if time.monotonic() > deadline:
                    raise ModelLoadError(self._missing_text(missing, refusal), param="parallel.hosts")
                listener.settimeout(ACCEPT_S)
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    continue
                if why := self._greet(connection, f"{address[0]}:{address[1]}"):
                    refusal = f"; the last that tried, from {address[0]}, was refused: {why}"
                    log.warning("a host was refused: %s", why)

    def send(self, command: DeviceCommand) -> None:
        """To all hosts, in the order of the calls; the engine's thread only. Raises HostGone."""
        if self.trouble:
            raise HostGone(self.trouble)
        frame = to_frame(to_message(command))
        for host_id, channel in self._channels.items():
            try:
                channel.send_frame(frame)
            except HostGone as gone:
                self._lose(host_id, str(gone))
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
        """This host cannot go on; the others are told."""
        self._tell_gone(error)
        self.close(error)

    def await_trouble(self, timeout_s: float) -> str:
        """What became of the other hosts, when a step has failed: the loss of one may be noticed a little later."""
        self._is_lost.wait(timeout_s)
        return self.trouble

    def status(self) -> tuple[HostStatus, ...]:
        """Of all hosts, this one included."""
        lead = HostStatus(0, "{}:{}".format(*self._parallel.command_address), "up", 0.0)
        return (lead, *(self._status_of(host) for host in range(1, self._parallel.hosts)))

    def close(self, reason: str) -> None:
        """Tell the others to end; idempotent, bounded by the host timeout."""
        with self._life:
            if self._is_closed:
                return
            self._is_closed = True
        for host_id, channel in self._channels.items():
            if host_id not in self._lost_ids:
                with contextlib.suppress(HostGone):
                    channel.send(["stop", reason[:MAX_TEXT]])
            channel.close()

    def _status_of(self, host_id: int) -> HostStatus:
        channel, address = self._channels.get(host_id), self._addresses.get(host_id, "")
        if channel is None:
            return HostStatus(host_id, address, "waiting")
        state = "gone" if host_id in self._lost_ids else "ended" if self._is_closed else "up"
        return HostStatus(host_id, address, state, round(channel.heard_s, 3))

    def _greet(self, connection: socket.socket, address: str) -> str:
        """Take a host in; or why not."""
        hello = HostChannel(connection, HELLO_TIMEOUT_S, MAX_REPORT_BYTES)
        try:
            message = hello.receive()
            why = self._judge(message)
            if why:
                hello.send(["refused", why])
                hello.close()
                return why
            channel = HostChannel(connection, self._parallel.host_timeout, MAX_REPORT_BYTES)
            channel.send(["welcome", self._sections])
        except HostGone as gone:
            hello.close()
            return str(gone)
        host_id: int = message[1]
        self._channels[host_id], self._addresses[host_id] = channel, address
        channel.start_beats()
        listen = threading.Thread(
            target=self._listen_to, args=(host_id, channel), name=f"host-{host_id}", daemon=True
        )
        listen.start()
        log.info("host %d of %d has come, from %s", host_id, self._parallel.hosts, address)
        return ""

    def _judge(self, message: list[Any]) -> str:
        if message[0] != "hello" or len(message) != 3 or not isinstance(message[1], int):
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
                        self.rungs.report(host_id, name, error[:MAX_TEXT])
                    case ["failed", str(why)]:
                        raise HostGone(f"it failed: {why[:MAX_TEXT]}")
                    case message:
                        raise HostGone(f"it sent {str(message[0])[:40]!r}, which is not known")
        except HostGone as gone:
            self._lose(host_id, str(gone))

    def _lose(self, host_id: int, why: str) -> None:
        """A host is gone: everybody here is told, and the others, which would wait for it in their steps."""
        if self._is_closed:
            return
        self._lost_ids.add(host_id)
        self._tell_gone(
            f"host {host_id} of {self._parallel.hosts} ({self._addresses[host_id]}) is gone: {why}"
        )
        self.close(self.trouble)

    def _tell_gone(self, trouble: str) -> None:
        with self._life:
            if self._is_closed or self._is_lost.is_set():
                return
            self.trouble = trouble
            self._is_lost.set()
        log.error(trouble)
        self._on_gone(trouble)

    def _missing_text(self, missing: list[int], refusal: str) -> str:
        names = ", ".join(map(str, missing[:10]))
        return (
            f"host {names} of {self._parallel.hosts} has not come within parallel.host_start_timeout of "
            f"{self._parallel.host_start_timeout:g} s{refusal}"
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
