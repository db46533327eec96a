"""`python -m control_plane --config FILE`: the HTTP endpoint and its engine in one process.

HTTP is up at once and says "loading" while weights and rungs come; SIGTERM drains, a second one ends at once.
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from control_plane.admin_auth import is_loopback
from control_plane.app import create_app
from control_plane.config_state import ConfigState, open_state
from control_plane.drain import DrainingServer, uvicorn_config
from control_plane.engine_handle import EngineHandle, ServedModel
from control_plane.service import EngineService
from control_plane.whole_files import FolderLocked
from runtime.config import EngineConfig, load_config, parse_config
from runtime.errors import RuntimeFault

ROLES = ("all", "prefill", "decode", "router")
POLL_S = 0.1
REPORT_S = 3.0
STOP_TIMEOUT_S = 10.0
log = logging.getLogger("control_plane")


class StartableEngine(EngineHandle, Protocol):
    """An engine whose thread has not been started."""

    def start(self) -> None: ...


type Build = Callable[[EngineConfig], tuple[StartableEngine, ServedModel]]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.role != "all":
        print(f"The role {args.role} is not built yet; use --role all.", file=sys.stderr)
        return 2
    try:
        config = _load_config(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every backend that is not there
    if not is_loopback(config.server.host):
        keys = (
            "keys are required"
            if config.server.api_keys
            else "no key is set, so anyone who reaches it can use it"
        )
        log.warning("listening on %s, which is not loopback: %s", config.server.host, keys)
    try:
        state = open_state(config)
    except (FolderLocked, OSError) as error:
        print(f"the changes of the configuration cannot be kept: {error}", file=sys.stderr)
        return 2
    return serve(state)


def serve(state: ConfigState) -> int:
    """Runs until a signal ends it. Returns the exit code."""
    server = LoadingServer(EngineService(state.config, state=state), _build_engine)
    server.run()
    if server.force_exit:
        os._exit(1)  # the second signal means now, whatever the engine's thread is doing
    status = 1 if server.load_failed else 0
    # A normal exit would first compile every rung that is queued, and JAX would wait for a host that is gone.
    if not server.stop_engine() or state.config.parallel.hosts > 1:
        sys.stdout.flush()
        os._exit(status)
    return status


def _build_engine(config: EngineConfig) -> tuple[StartableEngine, ServedModel]:
    from runtime.engine.build import build_engine  # noqa: PLC0415 - loads JAX, which takes seconds

    built = build_engine(config)
    return built.loop, ServedModel(
        built.loop, built.tokenizer, built.card, built.chat_template, built.grammars
    )


class LoadingServer(DrainingServer):
    """Serves at once, builds the engine in a thread of its own, and tells the operator how it goes."""

    def __init__(self, service: EngineService, build: Build) -> None:
        super().__init__(uvicorn_config(create_app(service), service), service)
        self.load_failed = False
        self._build_engine = build
        self._engine: StartableEngine | None = None
        self._reporter: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        print(f"moe-ladder: http://{name}:{port}/v1 is up, the model is loading", flush=True)
        threading.Thread(target=self._build, name="build", daemon=True).start()
        self._reporter = asyncio.create_task(self._report())

    def stop_engine(self) -> bool:
        return self._engine is None or self._engine.shutdown(STOP_TIMEOUT_S)

    def _build(self) -> None:
        try:
            engine, model = self._build_engine(self._service.config)
            self._engine = engine
            gc.collect()
            gc.freeze()  # what is loaded stays: a full collection that walks it stops the engine's thread for 0.1 s
            self._service.attach(model)
            engine.start()
        except RuntimeFault as fault:
            self._service.fail_to_load(fault.message)
        except Exception as error:
            log.exception("the engine could not be built")
            self._service.fail_to_load(f"{type(error).__name__}: {error}")

    async def _report(self) -> None:
        """How far loading and compiling are, every few seconds; the end of the process when it cannot be loaded."""
        start = time.monotonic()
        told = start
        while (state := self._service.readiness()[1]) in ("loading", "draining"):
            await asyncio.sleep(POLL_S)
            if time.monotonic() - told > REPORT_S:
                told = time.monotonic()
                print(f"moe-ladder: loading and compiling, {told - start:.0f} s", flush=True)
        if state == "failed":
            snapshot = self._service.snapshot
            reason = self._service.load_error or (snapshot.error if snapshot else "")
            print(f"moe-ladder: the model could not be loaded: {reason}", file=sys.stderr, flush=True)
            self.load_failed = self.should_exit = True
            return
        card = self._service.model.card
        seconds = time.monotonic() - start
        print(
            f"moe-ladder: {card.name} is ready on its first rungs after {seconds:.1f} s, "
            f"context {card.max_context} tokens",
            flush=True,
        )
        while (snapshot := self._service.snapshot) and any(r.state == "compiling" for r in snapshot.rungs):
            await asyncio.sleep(REPORT_S)
            num_ready = sum(r.state == "ready" for r in snapshot.rungs)
            print(f"moe-ladder: {num_ready} of {len(snapshot.rungs)} rungs compiled", flush=True)
        gc.freeze()  # the compiled rungs, too
        print(f"moe-ladder: all rungs ready after {time.monotonic() - start:.1f} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m control_plane", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--config", type=Path, help="YAML file; without it every setting has its default")
    parser.add_argument("--role", choices=ROLES, default="all")
    parser.add_argument("--host", help="address to listen on, instead of the file's")
    parser.add_argument("--port", type=int, help="port, instead of the file's; 0 takes a free one")
    parser.add_argument("--model", help="model folder, instead of the file's")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="dummy: seeded random weights")
    return parser


def _load_config(args: argparse.Namespace) -> EngineConfig:
    """The file with the command line's values on top. Raises ValueError with one line per wrong field."""

    def override(data: dict[str, Any]) -> None:
        for section, key, value in (
            ("server", "host", args.host),
            ("server", "port", args.port),
            ("model", "path", args.model),
            ("model", "load_format", args.load_format),
        ):
            if value is not None:
                data[section] = {**(data.get(section) or {}), key: value}

    if args.config is not None:
        config = load_config(args.config, override)
    else:
        data: dict[str, Any] = {}
        override(data)
        config = parse_config(data, source="command line")
    if config.server.demo and not is_loopback(config.server.host):
        raise ValueError(
            f"server.demo opens the admin routes without a key, so server.host must be a loopback address such as "
            f"127.0.0.1, not {config.server.host}; set server.admin_keys instead of server.demo"
        )
    return config


if __name__ == "__main__":
    sys.exit(main())
