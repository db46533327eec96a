"""The command: arguments, the time while the model loads, and models that cannot be loaded."""

import gc
import threading
from pathlib import Path

import httpx
import pytest

from control_plane.__main__ import LoadingServer, StartableEngine, main
from control_plane.engine_handle import ServedModel
from control_plane.service import EngineService
from control_plane.whole_files import LockedFolder
from runtime.config import EngineConfig
from runtime.errors import ModelLoadError
from tests.control_plane.conftest import make_config
from tests.control_plane.fake_engine import FakeEngine, served
from tests.patience import PATIENCE_S, until


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_other_roles_exit_2_with_a_sentence(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", role]) == 2
    assert role in capsys.readouterr().err


@pytest.mark.parametrize("text", ["server:\n  prot: 1\n", "server: [", "- 1\n", "server:\n  port: 99999\n"])
def test_wrong_configuration_exits_2(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") < 10


def test_demo_mode_is_refused_on_an_open_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server:\n  demo: true\n")
    assert main(["--config", str(path), "--host", "0.0.0.0"]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("server.demo", "0.0.0.0", "server.admin_keys"))


def test_two_servers_cannot_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"server:\n  state_dir: {tmp_path}/state\n")
    held = LockedFolder(tmp_path / "state")
    assert main(["--config", str(path)]) == 2
    assert "in use by another server" in capsys.readouterr().err
    held.close()


class Started:
    """A LoadingServer in a thread, whose build waits for `may_build`."""

    def __init__(self, fails: bool = False) -> None:
        self.engine = FakeEngine()
        self.may_build = threading.Event()
        self._fails = fails
        self.server = LoadingServer(EngineService(make_config()), self._build)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started and bool(self.server.servers))
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def _build(self, config: EngineConfig) -> tuple[StartableEngine, ServedModel]:
        self.may_build.wait(PATIENCE_S)
        if self._fails:
            raise ModelLoadError("model.safetensors is truncated")
        return self.engine, served(self.engine)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        self.server.stop_engine()


def test_http_is_up_while_the_model_loads(capfd: pytest.CaptureFixture[str]) -> None:
    started = Started()
    assert httpx.get(f"{started.url}/health/live").status_code == 200
    assert httpx.get(f"{started.url}/health/ready").status_code == 503
    answer = httpx.post(f"{started.url}/v1/completions", json={"model": "fake", "prompt": "a"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    started.may_build.set()
    until(lambda: httpx.get(f"{started.url}/health/ready").status_code == 200)
    assert gc.get_freeze_count() > 10_000, "what is loaded is no work for the collector"
    gc.unfreeze()
    answer = httpx.post(f"{started.url}/v1/completions", json={"model": "fake", "prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "a"
    until(lambda: "fake is ready" in capfd.readouterr().out)
    started.end()


def test_model_that_cannot_be_loaded_ends_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    started = Started(fails=True)
    started.may_build.set()
    started.thread.join(PATIENCE_S)
    assert started.server.load_failed
    assert "truncated" in capfd.readouterr().err
    started.end()
