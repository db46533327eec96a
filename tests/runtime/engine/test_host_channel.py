"""Channels between hosts: who is silent, and who only seems so."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from runtime.engine import host_channel
from runtime.engine.host_channel import HostChannel, HostGone
from runtime.engine.host_frames import to_frame


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


def test_silence_is_an_end() -> None:
    ours, theirs = connected()
    with theirs, pytest.raises(HostGone, match=r"silent for 0\.2 s"):
        HostChannel(ours, 0.2, 1000, takes_arrays=False).receive()
    ours.close()


def test_ones_own_standstill_is_not_the_others_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it 50 s later than the wait can have lasted, as after a stop of the machine."""
    looks = [0]

    def monotonic() -> float:
        looks[0] += 1
        return time.monotonic() + 50.0 * looks[0]

    monkeypatch.setattr(host_channel, "time", SimpleNamespace(monotonic=monotonic))
    ours, theirs = connected()
    channel = HostChannel(ours, 0.2, 1000, takes_arrays=False)
    sender = threading.Timer(0.7, theirs.sendall, (to_frame(["number", 7]),))
    sender.start()
    assert channel.receive() == ["number", 7]
    sender.join()
    theirs.close()
    channel.close()
