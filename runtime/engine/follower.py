"""`python -m runtime.engine.follower --config FILE --host-id N`: one of the hosts of an engine, all but the first.

No HTTP and no scheduler: it puts its part of the model on its devices and carries out what host 0 sends, in that order.
It ends, with a line on stderr, when host 0 does.
"""

import argparse
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from runtime.config import EngineConfig, load_config
from runtime.engine.device_commands import CompileRungs, DeviceCommand, RunStep, from_message
from runtime.engine.host_channel import HostChannel, HostGone
from runtime.engine.host_frames import MAX_COMMAND_BYTES, BadFrame, printable
from runtime.engine.host_greeting import config_of_leader, make_greeting
from runtime.errors import RuntimeFault
from runtime.xla_flags import settle_flags

RETRY_S = 0.2
MAX_TEXT = 500
log = logging.getLogger("runtime.engine.follower")


class LeaderGone(Exception):
    """Host 0 has ended, hangs, or has refused this host."""


class LeaderLink:
    """This host's end of the connection to host 0."""

    def __init__(self, channel: HostChannel, on_end: Callable[[int, str], None]) -> None:
        """on_end: called in a thread of the link's with an exit code and a sentence; need not return."""
        self._channel, self._on_end = channel, on_end
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.commands: queue.SimpleQueue[DeviceCommand] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="leader", daemon=True).start()

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all hosts say."""
        self._channel.send(["number", number])
        return self._numbers.get()

    def report(self, step: Any) -> None:
        """A CompiledStep is ready or has failed."""
        self._channel.send(["compiled", step.name, step.error])

    def fail(self, error: str) -> None:
        self._channel.send(["failed", error[:MAX_TEXT]])

    def _listen(self) -> None:
        try:
            while True:
                match self._channel.receive():
                    case ["number", int(number)]:
                        self._numbers.put(number)
                    case ["stop", str(reason)]:
                        self._on_end(0, f"host 0 has ended: {printable(reason, MAX_TEXT)}")
                        return
                    case message:
                        self.commands.put(from_message(message))
        except HostGone as gone:
            self._on_end(1, f"host 0 is gone: {gone}" + (f": {gone.detail}" if gone.detail else ""))
        except BadFrame as error:
            self._on_end(1, f"host 0 sent {error}")


def dial(config: EngineConfig, greeting: dict[str, Any]) -> tuple[HostChannel, EngineConfig]:
    """Connect to host 0, which may not be up yet. Raises LeaderGone when it does not come, or refuses."""
    parallel = config.parallel
    host, port = parallel.command_address
    deadline = time.monotonic() + parallel.host_start_timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=parallel.host_timeout)
            channel = HostChannel(connection, parallel.host_timeout, MAX_COMMAND_BYTES)
            try:
                channel.send(["hello", parallel.host_id, greeting])
                answer = channel.receive()
                if answer[0] == "welcome":
                    channel.start_beats()  # host 0 counts this host from its first beat on
            except HostGone:
                channel.close()
                raise
            break
        except (OSError, HostGone) as error:
            if time.monotonic() > deadline:
                raise LeaderGone(
                    f"host 0 has not answered at {host}:{port} within {parallel.host_start_timeout:g} s: {error}"
                ) from None
            time.sleep(RETRY_S)
    match answer:
        case ["welcome", sections]:
            return channel, config_of_leader(config, sections)
        case ["refused", str(why)]:
            channel.close()
            raise LeaderGone(f"host 0 at {host}:{port} refused this host: {printable(why, 4 * MAX_TEXT)}")
    channel.close()
    raise LeaderGone(f"{host}:{port} is no host 0 of this program")


def follow(config: EngineConfig, folder: Path) -> NoReturn:
    """Load and carry out commands, until host 0 ends."""
    from runtime.engine.build import load_devices  # noqa: PLC0415 - loads JAX, which takes seconds
    from runtime.engine.distributed import start_distributed  # noqa: PLC0415
    from runtime.engine.launch_watch import LaunchWatch  # noqa: PLC0415
    from runtime.engine.start_checks import context_limit  # noqa: PLC0415
    from runtime.ladder.compiler import sampler_name  # noqa: PLC0415
    from runtime.ladder.late_compiles import monitor  # noqa: PLC0415
    from runtime.model.architecture import load_architecture  # noqa: PLC0415

    channel, config = dial(config, make_greeting(config, folder))
    link = LeaderLink(channel, end)
    log.info("host 0 has taken this host in as host %d of %d", config.parallel.host_id, config.parallel.hosts)
    try:
        start_distributed(config.parallel)
        arch = load_architecture(folder)
        loaded = load_devices(
            config, folder, arch, context_limit(config, arch), link, on_compiled=link.report
        )
        work, compiler = loaded.work, loaded.work.compiler
        watch = LaunchWatch(partial(give_up, link))
        with monitor.expected_compiles():
            while True:
                command = link.commands.get()
                if isinstance(command, RunStep):
                    compiler.wait_for(command.name)
                    compiler.wait_for(sampler_name(command.sample_rows))
                result = work.run(command)
                if isinstance(command, RunStep):
                    watch.add(result)
                if isinstance(command, CompileRungs):
                    for step in {
                        n: compiler.step(n) for b in command.buckets for n in compiler.names_of(b)
                    }.values():
                        if step.call is not None:
                            link.report(step)
    except Exception as error:
        give_up(link, error)


def give_up(link: LeaderLink, error: Exception) -> NoReturn:
    """Tell host 0, and end."""
    text = error.message if isinstance(error, RuntimeFault) else f"{type(error).__name__}: {error}"
    log.error("this host failed", exc_info=error)
    try:
        link.fail(text)
    finally:
        end(1, text)


def end(code: int, text: str) -> NoReturn:
    """At once, whatever the other threads wait for: a collective that the others have left never ends."""
    print(f"moe-ladder follower: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.engine.follower", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file, as host 0 has it")
    parser.add_argument("--host-id", type=int, help="which host this is, instead of the file's; from 1")
    parser.add_argument("--model", help="model folder on this host, instead of the file's")
    args = parser.parse_args(argv)

    def override(data: dict[str, Any]) -> None:
        for section, key, value in (("parallel", "host_id", args.host_id), ("model", "path", args.model)):
            if value is not None:
                data[section] = {**(data.get(section) or {}), key: value}

    try:
        config = load_config(args.config, override)
        if config.parallel.host_id == 0:
            raise ValueError(
                f"parallel.host_id is 0, which python -m control_plane is; a follower is one of 1 to "
                f"{config.parallel.hosts - 1} (--host-id)"
            )
        settle_flags(config.parallel.micro_batch_overlap)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    from runtime.engine.build import model_folder  # noqa: PLC0415

    try:
        follow(config, model_folder(config))
    except (LeaderGone, RuntimeFault, ValueError) as error:
        end(1, str(error))


if __name__ == "__main__":
    sys.exit(main())
