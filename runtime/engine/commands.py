"""What may be asked of the engine's thread. Frozen; imports no JAX."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from runtime.config import EngineConfig
from runtime.engine.change import Applied
from runtime.engine.expert_status import ExpertAnswer, ExpertOrder
from runtime.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Start these requests."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests and free what they hold."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function in the engine's thread between two steps (live changes, tests)."""

    function: Callable[[], None]

    def run(self) -> None:
        try:
            self.function()
        except Exception:
            log.exception("a call between two steps failed")


@dataclass(frozen=True, slots=True)
class Configure:
    """Take over a configuration; the future ends when its live fields hold."""

    config: EngineConfig
    ordered_s: float  # monotonic
    done: Future[Applied]

    def refuse(self, error: Exception) -> None:
        _refuse(self.done, error)


@dataclass(frozen=True, slots=True)
class MoveExperts:
    """Carry out an operator's order about the experts' placement; the future ends with the answer, maybe some turns later."""

    order: ExpertOrder
    carry_out: Callable[[ExpertOrder, Future[ExpertAnswer]], None]
    done: Future[ExpertAnswer]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            self.carry_out(self.order, self.done)
        except Exception as error:
            self.done.set_exception(error)

    def refuse(self, error: Exception) -> None:
        _refuse(self.done, error)


def _refuse(done: Future[Any], error: Exception) -> None:
    """Unless whoever waited has given up: a future that was cancelled takes no error."""
    if done.set_running_or_notify_cancel():
        done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; what still runs ends with an error event."""


type Command = Submit | Abort | Call | Configure | MoveExperts | Stop
