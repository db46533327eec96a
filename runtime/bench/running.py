"""Opens an engine for a measurement: configuration from a file and overrides, start, wait until every rung is ready."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.bench.client import EngineClient
from runtime.bench.report import console
from runtime.bench.roofline import ModelShape, load_shape
from runtime.config import EngineConfig, load_config, parse_config
from runtime.engine.stats import EngineSnapshot

READY_TIMEOUT_S = 1800.0
# A measurement submits far more than is admitted at once, and nothing of it may be refused.
ENDLESS_QUEUE = {
    "server.max_queued_requests": 1 << 16,
    "server.max_queued_tokens": 1 << 30,
    "server.queue_timeout": "24h",
}
_SNAPSHOT_AGE_S = 0.25  # the engine renews its snapshot more often than this
DEMO_MODEL = Path(__file__).parents[1] / "assets" / "demo-moe"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A running engine with its client. `first_rung_s` and `all_rungs_s` count from the start of loading."""

    config: EngineConfig
    client: EngineClient
    shape: ModelShape
    model_name: str
    first_rung_s: float
    all_rungs_s: float
    loop: Any

    def snapshot(self) -> EngineSnapshot:
        return self.loop.snapshot()

    def fresh_snapshot(self) -> EngineSnapshot:
        """A snapshot taken after everything that has finished by now."""
        time.sleep(_SNAPSHOT_AGE_S)
        return self.snapshot()

    @property
    def max_context(self) -> int:
        return self.config.model.max_context or self.shape.max_context

    def config_stamp(self) -> dict[str, Any]:
        """The configuration for a result file: what shapes the figures, without folders and keys."""
        hidden = {"server": True, "model": {"path"}, "ladder": {"cache_dir"}}
        return self.config.model_dump(mode="json", exclude=hidden)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of every command that runs an engine."""
    parser.add_argument(
        "--model", default="", help="folder in Hugging Face layout (default: the embedded model)"
    )
    parser.add_argument("--config", type=Path, help="YAML file (default: built-in values)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="one field of the configuration, for example --set ladder.max_prefill_tokens=256",
    )  # fmt: skip
    parser.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights from config.json"
    )
    parser.add_argument("--threads", type=int, help="cores to use (default: all)")


def config_of(args: argparse.Namespace, overrides: dict[str, Any]) -> EngineConfig:
    """The file, then what the measurement needs (`overrides`), then the user's own `--set`: the last word wins."""

    def change(data: dict[str, Any]) -> None:
        chosen = dict(overrides)
        if args.model:
            chosen["model.path"] = args.model
        if args.load_format:
            chosen["model.load_format"] = args.load_format
        for setting in args.settings:
            key, separator, text = setting.partition("=")
            if not separator:
                raise ValueError(f"--set {setting}: write KEY=VALUE")
            chosen[key] = yaml.safe_load(text)
        for key, value in chosen.items():
            _put(data, key, value)

    if args.config is not None:
        return load_config(args.config, change)
    data: dict[str, Any] = {}
    change(data)
    return parse_config(data)


@contextmanager
def open_engine(config: EngineConfig, threads: int | None = None) -> Iterator[RunningEngine]:
    """An engine with all its rungs ready; stopped on leaving."""
    if threads:
        os.sched_setaffinity(
            0, sorted(os.sched_getaffinity(0))[:threads]
        )  # before XLA sizes its pool of threads
    from runtime.engine.build import build_engine  # noqa: PLC0415 - brings JAX, which must see the cores set above

    folder = Path(config.model.path) if config.model.path else DEMO_MODEL
    started_s = time.monotonic()
    with console.status("loading weights") as status:
        built = build_engine(config)
        built.loop.start()
        try:
            status.update("compiling the first rung")
            built.loop.wait_ready(READY_TIMEOUT_S)
            first_rung_s = time.monotonic() - started_s
            status.update("compiling the other rungs")
            built.loop.wait_complete(READY_TIMEOUT_S)
        except BaseException:
            built.loop.shutdown()
            raise
    all_rungs_s = time.monotonic() - started_s
    console.print(
        f"first rung ready after {first_rung_s:.1f} s, all rungs after {all_rungs_s:.1f} s", highlight=False
    )
    try:
        client = EngineClient(built.loop)
        name = config.model.served_name or folder.resolve().name
        yield RunningEngine(config, client, load_shape(folder), name, first_rung_s, all_rungs_s, built.loop)
    finally:
        built.loop.shutdown()


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[name] = value
