"""Two real processes on this machine that serve one tiny model together, each with one virtual device."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.engine_driver import TINY
from tests.ports import free_ports

ROOT = Path(__file__).parents[3]
MODEL = TINY | {"vocab_size": 264, "num_hidden_layers": 1, "mlp_only_layers": []}
SECTIONS: dict[str, Any] = {
    "model": {"load_format": "dummy", "dtype": "fp32", "served_name": "tiny"},
    "batch_processing": {"max_batch_size": 4, "enable_dynamic_batch": False},
    "kv_cache": {"kv_cache_size": "4MiB", "page_size": 4},
    "ladder": {"decode_rows": [4], "prefill_tokens": [32], "max_prefill_rows": 4, "max_decode_steps": 4},
    "parallel": {"expert_parallel_size": 2, "redundant_experts": 2},
}


class TwoHosts:
    """`leader` answers at `client`; what both print is in `folder`."""

    def __init__(self, folder: Path, cache: Path, silence_s: float) -> None:
        """silence_s: long, but where silence is what is tested: on a busy machine processes stand still for seconds."""
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        http, coordinator, commands = free_ports(3)
        sections = SECTIONS | {
            "model": SECTIONS["model"] | {"path": str(folder / "model")},
            "server": {"port": http, "demo": True, "state_dir": "off", "drain_delay": "0s"},
            "ladder": SECTIONS["ladder"] | {"cache_dir": str(cache)},
        }
        sections["parallel"] = SECTIONS["parallel"] | {
            "hosts": 2,
            "coordinator": f"127.0.0.1:{coordinator}",
            "command_port": commands,
            "host_timeout": f"{silence_s:g}s",
            "host_start_timeout": "60s",
        }
        self.config = folder / "hosts.yaml"
        self.config.write_text(yaml.safe_dump(sections))
        self.leader = self._start("leader", "control_plane")
        self.follower = self._start("follower", "runtime.engine.follower", "--host-id", "1")
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=300)
        try:
            self.wait(lambda: self.get("/health/ready").get("ready"), 120)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, module: str, *args: str) -> subprocess.Popen[bytes]:
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(self.config), *args],
                cwd=ROOT,
                env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def get(self, path: str) -> dict[str, Any]:
        """Empty while nobody listens."""
        try:
            return self.client.get(path).json()
        except httpx.TransportError:
            return {}

    def ids(self, prompt: list[int], num_tokens: int) -> list[int]:
        answer = self.complete(prompt, num_tokens)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def complete(self, prompt: list[int], num_tokens: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        return self.client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})

    def wait(self, is_so: Callable[[], Any], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            is_lost = self.leader.poll() is not None or time.monotonic() > deadline
            assert not is_lost, self.log("leader") + self.log("follower")
            time.sleep(0.05)

    def close(self) -> None:
        for process in (self.leader, self.follower):
            process.kill()
            process.wait(60)
        self.client.close()
