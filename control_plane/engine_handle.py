"""What the HTTP side asks of an engine: the protocols that `runtime` fulfils and the test's fake engine imitates.

Nothing here knows HTTP. Names describe shapes only; `runtime.engine` holds the real classes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.adaptive.decision import Decision
from runtime.config import EngineConfig
from runtime.engine.change import Applied, ConfigChange
from runtime.engine.expert_status import ExpertAnswer, ExpertOrder
from runtime.engine.stats import EngineSnapshot
from runtime.engine.timelines import Timelines
from runtime.request import GrammarSpec, Request, TokenEvent

Publish = Callable[[list[TokenEvent]], None]


class EngineHandle(Protocol):
    """The engine as other threads see it. Every method may be called from any thread and returns at once."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Admits all requests or none. Raises RuntimeFault: QueueFull, ContextTooLong, InvalidRequest, Unavailable."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees what the requests hold within one step. Unknown and finished ids are ignored."""

    def snapshot(self) -> EngineSnapshot:
        """The last published state."""
        ...

    def set_publisher(self, publish: Publish) -> None:
        """`publish` is called in the engine's thread, once for each step, with all events of the step."""

    @property
    def config(self) -> EngineConfig:
        """The configuration in force: `restart` fields as at the start, the others as last configured."""
        ...

    def plan(self, config: EngineConfig, must_start: bool = True) -> ConfigChange:
        """What `configure` would do; nothing happens. Raises InvalidRequest, `param` the field, where it cannot.

        must_start: also where no later start could be made with it; else that is a warning.
        """
        ...

    def configure(self, config: EngineConfig) -> Future[Applied]:
        """Take over the `live` fields before the next step and compile what rungs are missing in the background.

        Fields of kind `restart` are ignored. The old ladder serves until all added rungs are ready and stays if one
        fails: `snapshot().ladder_change` tells. The future ends when the live fields hold. Raises InvalidRequest as
        `plan` does without `must_start`, Unavailable while the engine loads.
        """
        ...

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        """The controllers' decisions with numbers above `after`, oldest first."""
        ...

    def decision_counts(self) -> dict[tuple[str, str], int]:
        """Decisions since the start by (controller, reason)."""
        ...

    def order_experts(self, order: ExpertOrder) -> Future[ExpertAnswer]:
        """Carry out an operator's order about the experts' placement. Raises InvalidRequest, or the future does,
        where it does not fit; Unavailable while the engine loads."""
        ...

    @property
    def timelines(self) -> Timelines:
        """What happened to each of the last requests."""
        ...

    def begin_drain(self) -> None:
        """From now on `submit` raises Unavailable; running requests go on."""

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """Ends the engine's thread; running requests get an error event. False if it still runs. May be called twice."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ChatTemplate(Protocol):
    """Messages to the text that the model was trained to continue."""

    @property
    def is_present(self) -> bool: ...
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequest when there is no template or it refuses the messages."""
        ...


class Grammars(Protocol):
    """Refuses a bad constraint before its request is admitted."""

    def validate(self, spec: GrammarSpec) -> None:
        """Raises InvalidRequest when the constraint is wrong or too large. Safe in any thread."""


class ModelCard(Protocol):
    """What the API tells about the model. `created` is Unix seconds."""

    @property
    def name(self) -> str: ...
    @property
    def max_context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def created(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its engine."""

    engine: EngineHandle
    tokenizer: Tokenizer
    card: ModelCard
    chat_template: ChatTemplate
    grammars: Grammars
