"""Leader and followers over real sockets, in this process: who is taken in, what is sent, whose loss is noticed."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.config import parse_config
from runtime.engine import leader as leader_module
from runtime.engine.device_commands import MoveWeights
from runtime.engine.follower import LeaderGone, LeaderLink, dial
from runtime.engine.host_channel import HostGone
from runtime.engine.host_frames import HEADER, to_frame
from runtime.engine.host_greeting import config_of_leader, make_greeting, shaping_sections
from runtime.engine.leader import Leader
from runtime.errors import ModelLoadError
from runtime.ladder.compiler import CompiledStep, RungState
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports

GREETING: dict[str, Any] = {"protocol": 1, "model.dtype": "fp32"}
ORDER = np.array([[1, 0], [-1, -1]], np.int32)  # of a move


def config(host_id: int, num: int = 3, port: int = 0, **parallel: Any):
    """port: where commands are awaited."""
    wishes = {
        "expert_parallel_size": num,
        "hosts": num,
        "host_id": host_id,
        "coordinator": "127.0.0.1:9",
        "command_port": port,
        "host_timeout": "60s",
        "host_start_timeout": "60s",
    }
    return parse_config({"parallel": wishes | parallel})


@dataclass
class Cluster:
    """A leader with two followers, none of which computes."""

    leader: Leader
    links: dict[int, LeaderLink] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


@contextmanager
def cluster(**parallel: Any) -> Iterator[Cluster]:
    (port,) = free_ports(1)
    lead = config(0, port=port, **parallel)
    found = Cluster(Leader(lead.parallel, GREETING, shaping_sections(lead)))
    found.leader.on_gone(found.troubles.append)
    gathering = threading.Thread(target=found.leader.gather)
    gathering.start()
    for host in (2, 1):
        channel, _ = dial(config(host, port=port, **parallel), GREETING)
        found.links[host] = LeaderLink(channel, lambda *end, host=host: found.ends.update({host: end}))
    gathering.join(PATIENCE_S)
    assert not gathering.is_alive()
    yield found
    found.leader.close("the test ends")
    for link in found.links.values():
        link._channel.close()


def test_commands_come_in_order_and_rungs_are_ready_when_all_have_them() -> None:
    with cluster() as c:
        for i in range(50):
            c.leader.send(MoveWeights(i, ORDER))
        for link in c.links.values():
            commands = [link.commands.get(timeout=PATIENCE_S) for _ in range(50)]
            assert [type(command) for command in commands] == [MoveWeights] * 50
            assert [command.layer for command in commands] == list(range(50))  # pyright: ignore
        ready = CompiledStep("decode-4", RungState.READY)
        c.links[1].report(ready)
        until(lambda: c.leader.rungs._errors[1])
        assert not c.leader.rungs.is_everywhere("decode-4")
        c.links[2].report(ready)
        until(lambda: c.leader.rungs.is_everywhere("decode-4"))
        c.links[2].report(CompiledStep("decode-4", RungState.FAILED, error="no memory"))
        until(lambda: c.leader.rungs.error("decode-4") == "on host 2: no memory")
        assert [(h.host_id, h.state) for h in c.leader.status()] == [(0, "up"), (1, "up"), (2, "up")]


def test_all_hosts_get_the_smallest_number() -> None:
    with cluster() as c:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda host=host: found.append(c.links[host].smallest(40 - host)))
            for host in (1, 2)
        ]
        for thread in threads:
            thread.start()
        assert c.leader.smallest(100) == 38
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [38, 38]


def test_a_closed_connection_is_noticed_at_once_and_the_others_are_told() -> None:
    with cluster() as c:
        start = time.monotonic()
        c.links[2]._channel.close()
        until(lambda: c.troubles)
        assert time.monotonic() - start < 40  # not by silence
        assert "host 2 of 3 (127.0.0.1:" in c.troubles[0]
        assert "is gone: connection closed" in c.troubles[0]
        until(lambda: 1 in c.ends)
        assert c.ends[1] == (0, f"host 0 has ended: {c.troubles[0]}")
        assert [h.state for h in c.leader.status()] == ["up", "ended", "gone"]
        with pytest.raises(HostGone, match="host 2 of 3"):
            c.leader.send(MoveWeights(0, ORDER))
        with pytest.raises(HostGone, match="host 2 of 3"):
            c.leader.smallest(3)
    assert len(c.troubles) == 1


def test_silence_is_noticed_and_a_busy_host_is_not_silent() -> None:
    with cluster(host_timeout="4s") as c:
        time.sleep(4.2)  # more than the timeout: nobody has anything to say, all beat
        assert not c.troubles
        assert not c.ends
        c.links[1]._channel._is_closed.set()  # its beats end, its connection does not
        until(lambda: c.troubles)
        assert c.troubles[0].endswith("is gone: silent for 4 s")


def test_the_leaders_end_is_noticed() -> None:
    with cluster() as c:
        c.leader._is_closed = True  # it does nothing more
        for channel in c.leader._channels.values():
            channel.close()  # as the end of its process does
        until(lambda: len(c.ends) == 2)
        assert c.ends[1] == (1, "host 0 is gone: connection closed")


@pytest.mark.parametrize(
    ("sent", "reason", "detail"),
    [
        (HEADER.pack(1 << 30), "it sent what is no message", "a frame of 1073741824 bytes"),
        (HEADER.pack(3) + b"abc", "it sent what is no message", ""),
        (to_frame(["number", ORDER]), "it sent what is no message", "extension 1 is not expected here"),
        (to_frame(["obey\n", 1]), "it sent what is not known", "obey?"),
        (to_frame(["number", "many"]), "it sent what is not known", "number"),
        (to_frame(["failed", "no memory\nat /srv/me"]), "it has failed", "no memory?at /srv/me"),
    ],
)
def test_a_follower_that_says_nonsense_is_gone_and_its_words_are_for_operators(sent, reason, detail) -> None:
    with cluster() as c:
        c.links[1]._channel.send_frame(sent)
        until(lambda: c.troubles)
        assert c.troubles[0].endswith(f"is gone: {reason}")
        status = c.leader.status()[1]
        assert (status.state, status.reason) == ("gone", reason)
        assert detail in status.detail


def test_this_hosts_own_error_is_for_operators() -> None:
    with cluster() as c:
        c.leader.give_up("XlaRuntimeError: at /srv/me")
        assert c.troubles == ["host 0 of 3 has failed"]
        assert c.leader.status()[0].detail == "XlaRuntimeError: at /srv/me"
        until(lambda: len(c.ends) == 2)


def test_the_others_are_told_even_if_telling_this_process_fails() -> None:
    def fail(trouble: str) -> None:
        raise ValueError(trouble)

    with cluster() as c:
        c.leader.on_gone(fail)
        with pytest.raises(ValueError, match="host 2 of 3"):
            c.leader._lose(2, HostGone("silent"))
        until(lambda: 1 in c.ends)
        assert "host 2 of 3" in c.ends[1][1]


def test_the_end_does_not_wait_for_a_host_that_takes_nothing() -> None:
    with cluster(host_timeout="60s") as c, c.leader._channels[2]._sending:
        start = time.monotonic()
        c.leader.close("the test ends")
        assert time.monotonic() - start < 30
        until(lambda: c.ends.get(1) == (0, "host 0 has ended: the test ends"))


def test_wrong_hosts_are_refused_by_name_and_the_missing_one_is_named(monkeypatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(leader_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    (port,) = free_ports(1)
    parallel = config(0, 2, port).parallel
    leader = Leader(parallel, GREETING, {})
    failures: list[ModelLoadError] = []

    def gather() -> None:
        with pytest.raises(ModelLoadError) as info:
            leader.gather()
        failures.append(info.value)

    gathering = threading.Thread(target=gather)
    gathering.start()
    one = config(1, 2, port)
    with pytest.raises(LeaderGone, match=r"model\.dtype is fp32 on host 0, bf16 on host 1"):
        dial(one, GREETING | {"model.dtype": "bf16"})
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET ")  # a length far beyond what a hello may have
        assert stranger.recv(100) == b""
    with pytest.raises(LeaderGone, match=r"host_id is 2; 1 to 1 are allowed"):
        dial(config(2, 3, port), GREETING)
    with pytest.raises(LeaderGone, match="extra is None on host 0, 3 on host 1"):
        dial(one, GREETING | {"extra": 3})
    now_s[0] = 61
    gathering.join(PATIENCE_S)
    assert "host 1 of 2 has not come within parallel.host_start_timeout of 60 s" in str(failures[0])
    assert "the last that tried, from 127.0.0.1, was refused: " in str(failures[0])
    with pytest.raises(LeaderGone, match=r"has not answered at 127\.0\.0\.1"):
        dial(config(1, 2, port, host_start_timeout="1s"), GREETING)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        leader = Leader(config(0, 2, port).parallel, GREETING, {})
        with pytest.raises(ModelLoadError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            leader.gather()


def test_greeting_names_what_shapes_the_steps_and_not_what_is_each_hosts_own(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    lead, other = config(0), config(1)
    assert make_greeting(lead, tmp_path) == make_greeting(other, tmp_path)
    assert "parallel.capacity_factor" in make_greeting(lead, tmp_path)
    before = make_greeting(lead, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert make_greeting(lead, tmp_path) != before


def test_a_follower_takes_what_changes_live_from_the_leader() -> None:
    lead = parse_config(
        config(0).model_dump(mode="json") | {"ladder": {"decode_rows": [3, 6], "row_slots": 64}}
    )
    found = config_of_leader(config(1), shaping_sections(lead))
    assert found.ladder.decode_rows == (3, 6)
    assert (found.parallel.host_id, found.ladder.row_slots) == (1, 0)  # restart fields are its own
    for wrong in (None, {"server": {}}, {"ladder": {"decode_rows": "many"}}):
        with pytest.raises(ValueError, match="host 0"):
            config_of_leader(config(1), wrong)
