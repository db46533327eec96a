"""A server to test against: one that runs already, the real one on a model folder, or the fake engine."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 300
FAKE = """
import sys
from control_plane.app import create_app
from control_plane.drain import DrainingServer, uvicorn_config
from control_plane.service import EngineService
from runtime.config import load_config
from tests.control_plane.fake_engine import FakeEngine, served
from pathlib import Path
service = EngineService(load_config(Path(sys.argv[1])))
service.attach(served(FakeEngine()))
server = DrainingServer(uvicorn_config(create_app(service), service), service)
original = server.startup
async def startup(sockets=None):
    await original(sockets)
    print(f"up at http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", flush=True)
server.startup = startup
server.run()
"""


@contextmanager
def served_model(model: str | None, aliases: Sequence[str], config: Path | None = None) -> Iterator[str]:
    """Base URL (with /v1) of a new server: the real one on `model` ("" is the embedded one), or the fake engine."""
    data = yaml.safe_load(config.read_text()) if config else {}
    data["server"] = (data.get("server") or {}) | {"port": 0}
    data["model"] = (
        (data.get("model") or {}) | {"aliases": list(aliases)} | ({"path": model} if model else {})
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(data))
        command = ["-c", FAKE, str(path)] if model is None else ["-m", "control_plane", "--config", str(path)]
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            yield _wait_until_ready(process)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    url = next((word for word in line.split() if word.startswith("http://")), None)
    if url is None:
        raise RuntimeError(f"the server did not start: {line}")
    end = time.monotonic() + READY_TIMEOUT_S
    while httpx.get(url.removesuffix("/v1") + "/health/ready").status_code != 200:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the server did not get ready")
        time.sleep(0.2)
    return url
