"""A real follower's process whose leader goes while it waits for the other hosts inside JAX."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from runtime.config import load_config
from runtime.engine.follower import main
from runtime.engine.host_greeting import make_greeting, shaping_sections
from runtime.engine.leader import Leader
from runtime.xla_flags import set_xla_flags
from tests.ports import free_ports
from tests.runtime.engine.two_hosts import MODEL, ROOT, SECTIONS


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    coordinator, commands = free_ports(2)
    parallel = {"hosts": 2, "coordinator": f"127.0.0.1:{coordinator}", "command_port": commands}
    sections = SECTIONS | {
        "model": SECTIONS["model"] | {"path": str(tmp_path)},
        "parallel": SECTIONS["parallel"] | parallel,
    }
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "hosts.yaml"


def test_a_follower_ends_when_its_leader_does(config, monkeypatch) -> None:
    given = os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", given)
    set_xla_flags()  # as the leader does: the follower is taken in only if it does too
    lead = load_config(config)
    leader = Leader(lead.parallel, make_greeting(lead, config.parent), shaping_sections(lead))
    gathering = threading.Thread(target=leader.gather)
    gathering.start()
    follower = subprocess.Popen(
        [sys.executable, "-m", "runtime.engine.follower", "--config", str(config), "--host-id", "1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": given},
        stderr=subprocess.PIPE,
    )
    try:
        gathering.join(120)
        assert [h.state for h in leader.status()] == ["up", "up"]
        leader._channels[1]._socket.shutdown(socket.SHUT_RDWR)  # as the end of its process does
        _, said = follower.communicate(timeout=120)
        assert b"moe-ladder follower: host 0 is gone: connection closed" in said
        assert follower.returncode != 0
    finally:
        follower.kill()
        leader.close("the test ends")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "parallel.host_id is 0, which python -m control_plane is"),
        (("--host-id", "2"), "parallel.host_id is 2; with parallel.hosts of 2 it is at most 1"),
    ],
)
def test_a_wrong_host_id_is_named(config, capsys, args, text) -> None:
    assert main(["--config", str(config), *args]) == 2
    assert text in capsys.readouterr().err
