"""While host 0 awaits the others: strangers, slow ones and hosts that give up hold up nobody and end nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.engine import leader as leader_module
from runtime.engine.follower import dial
from runtime.engine.host_channel import HostChannel
from runtime.engine.host_frames import MAX_COMMAND_BYTES, to_frame
from runtime.engine.leader import Leader
from runtime.errors import ModelLoadError
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports
from tests.runtime.engine.test_leader import GREETING, config

HOST_TIMEOUT = "60s"  # no test waits for it


@dataclass
class Gathering:
    """`gather` of a leader of three hosts in a thread, and how it ended."""

    port: int
    leader: Leader
    ends: list[str] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.leader.gather()
            self.ends.append("all are here")
        except ModelLoadError as error:
            self.ends.append(error.message)

    def come(self, *hosts: int) -> list[HostChannel]:
        return [dial(config(host, port=self.port, host_timeout=HOST_TIMEOUT), GREETING)[0] for host in hosts]

    def connect(self, sent: bytes = b"") -> socket.socket:
        stranger = until(self._connection)
        stranger.sendall(sent)
        return stranger

    def _connection(self) -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


@pytest.fixture
def gathering(monkeypatch) -> Iterator[Gathering]:
    monkeypatch.setattr(leader_module, "HELLO_TIMEOUT_S", 60.0)  # no test waits for it either
    (port,) = free_ports(1)
    wishes = {"host_timeout": HOST_TIMEOUT, "host_start_timeout": "60s"}
    found = Gathering(port, Leader(config(0, port=port, **wishes).parallel, GREETING, {}))
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.leader.close("the test ends")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def wait(gathering: Gathering) -> str:
    until(lambda: gathering.ends)
    return gathering.ends[0]


@pytest.mark.parametrize(
    "hello",
    [
        ["hello", 1, {"model.dtype": np.zeros(3, np.int32)}],
        ["hello", 1, GREETING | {"x": np.zeros(3, np.int32)}],
        ["hello", True, GREETING],
        ["hello", 1, 7],
        ["hello", [1], GREETING],
    ],
)
def test_a_strange_hello_ends_nothing(gathering, hello) -> None:
    with gathering.connect(to_frame(hello)) as stranger:
        while stranger.recv(1000):
            pass  # a refusal, or nothing, and the end
    channels = gathering.come(1, 2)
    assert wait(gathering) == "all are here"
    for channel in channels:
        channel.close()


def test_words_of_a_stranger_are_one_line_of_the_log(gathering, caplog) -> None:
    with gathering.connect(to_frame(["hello", 1, GREETING | {"a\nCRITICAL": "b\rc"}])) as stranger:
        while stranger.recv(1000):
            pass
    (refusal,) = until(lambda: [message for message in caplog.messages if "refused" in message])
    assert "a?CRITICAL is None on host 0, b?c on host 1" in refusal
    assert "\n" not in refusal


def test_who_says_nothing_holds_up_nobody(gathering) -> None:
    silent = [gathering.connect() for _ in range(5)]
    start = time.monotonic()
    channels = gathering.come(1, 2)
    assert wait(gathering) == "all are here"
    assert time.monotonic() - start < leader_module.HELLO_TIMEOUT_S
    for end in (*silent, *channels):
        end.close()


def test_a_hello_that_comes_byte_by_byte_has_one_deadline(gathering, monkeypatch) -> None:
    monkeypatch.setattr(leader_module, "HELLO_TIMEOUT_S", 0.3)
    start, hello = time.monotonic(), to_frame(["hello", 1, {"x": "y" * 10_000}])

    def drip(slow: socket.socket) -> None:
        for byte in hello:
            slow.sendall(bytes([byte]))
            time.sleep(0.02)

    with gathering.connect() as slow, pytest.raises(OSError, match=r"Broken pipe|reset"):
        drip(slow)
    assert time.monotonic() - start < 60  # 200 s as long as bytes come


def test_a_host_that_gave_up_before_it_was_greeted_has_not_come(gathering) -> None:
    gathering.connect(to_frame(["hello", 1, GREETING])).close()
    with gathering.connect() as connection:  # it reads its welcome and dies before its first beat
        channel = HostChannel(connection, PATIENCE_S, MAX_COMMAND_BYTES)
        channel.send(["hello", 1, GREETING])
        assert channel.receive()[0] == "welcome"
    channels = gathering.come(2, 1)
    assert wait(gathering) == "all are here"
    for channel in channels:
        channel.close()


def test_a_host_that_is_lost_meanwhile_ends_the_start_by_name(gathering) -> None:
    (channel,) = gathering.come(1)
    until(lambda: [h.state for h in gathering.leader.status()] == ["up", "up", "waiting"])
    channel.close()
    assert "host 1 of 3 (127.0.0.1:" in wait(gathering)
