"""ConfigChange: what a new configuration would do, before anything is done. Imports no JAX."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ChangeKind(StrEnum):
    """How a changed field takes effect."""

    LIVE = "live"  # from the next step on
    RECOMPILE = "recompile"  # once the added rungs are compiled, in the background
    RESTART = "restart"  # when the server is started again


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field, by its dotted path, with its values as they stand in a YAML file."""

    path: str
    kind: ChangeKind
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The plan of a change.

    compile_s, temp_bytes: expected seconds until the added rungs serve, and the scratch memory they need; from
    rungs of like size that are compiled already.
    """

    fields: tuple[FieldChange, ...]
    rungs_to_add: tuple[str, ...]
    rungs_to_drop: tuple[str, ...]
    compile_s: float
    temp_bytes: int
    warnings: tuple[str, ...]


class LadderState(StrEnum):
    """Where a change of the ladder is."""

    STEADY = "steady"  # nothing to do
    COMPILING = "compiling"  # the old ladder serves meanwhile
    FAILED = "failed"  # the old ladder stays


@dataclass(frozen=True, slots=True)
class LadderChange:
    """The ladder's last change. `number` counts changes, so that a watcher can tell a new one from the last."""

    number: int
    state: LadderState
    rungs_to_add: tuple[str, ...] = ()
    rungs_to_drop: tuple[str, ...] = ()
    error: str = ""  # names the rung
    seconds: float = 0.0  # from the order to the swap


@dataclass(frozen=True, slots=True)
class Applied:
    """The engine has taken a configuration: it holds from step `num_steps` + 1 on."""

    num_steps: int
    took_s: float  # from the order to the engine's taking it
    ladder: LadderChange
