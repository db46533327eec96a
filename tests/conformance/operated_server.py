"""A real server on the embedded model in demo mode, with a folder of its own for revisions and audit; may be killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.server import ROOT, _wait_until_ready


@dataclass(frozen=True)
class OperatedServer:
    """base_url: with /v1."""

    base_url: str
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")


@contextmanager
def operated_server(
    folder: Path,
    row_slots: int,
    ladder: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
) -> Iterator[OperatedServer]:
    """`folder` keeps the state between two starts. fp32, so that greedy answers do not hang on the rung."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "server": {"port": 0, "demo": True, "state_dir": str(folder / "state")},
        "model": {"aliases": ["live"], "dtype": "fp32"},
        "batch_processing": {"max_batch_size": row_slots, "base_batch_size": row_slots},
        "kv_cache": {"kv_cache_size": "256MiB"},
        "experts": experts or {},
        "ladder": {"row_slots": row_slots, "max_prefill_tokens": 256, "max_prefill_rows": 8} | (ladder or {}),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "control_plane", "--config", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield OperatedServer(_wait_until_ready(process), process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
