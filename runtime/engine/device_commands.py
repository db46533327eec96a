"""DeviceCommand: everything that changes or reads the arrays on the devices, with its host inputs. Imports no JAX.

One engine makes them, in one order; on several hosts each carries out the same commands in the same order, so that the
collectives inside the compiled steps meet. Whatever is decided by time or by reading a result is settled before.
"""

from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import numpy as np

from runtime.engine.host_frames import BadFrame
from runtime.ladder.bucket import Bucket


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Give a row slot to a sequence. slot: a number, with several shards one for each; floats, ints: its RowRecord.

    dense: bias, tokens seen in the prompt and counts by token of the vocabulary, or nothing.
    """

    slot: np.ndarray
    budget: int
    floats: np.ndarray
    ints: np.ndarray
    dense: tuple


@dataclass(frozen=True, slots=True)
class SetMask:
    """The grammar bit mask of a row slot, [1, words]."""

    slot: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class RunStep:
    """Launch a rung by the name of its form. sample_rows: rows of the sampler that follows a prefill; 0: none."""

    name: str
    is_prefill: bool
    packed: np.ndarray
    sample_rows: int = 0


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """Log probabilities of `targets` after the positions from `offset` of the last prefill; by shard."""

    offset: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, slots=True)
class MoveWeights:
    """Copy experts of a layer into other slots and set its table of copies: an order of `move_order.order_of`."""

    layer: int
    order: np.ndarray


@dataclass(frozen=True, slots=True)
class SetBalanceWeight:
    """How unequally copies of an expert may share its rows: expert_balance_weight, in [0, 0.5]."""

    weight: float


@dataclass(frozen=True, slots=True)
class LeanRouter:
    """What is added to the scores that experts of a layer are chosen by, float32 [E]; instead of what was before."""

    layer: int
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class WakeWeights:
    """Copy an expert of a layer from the host's memory into a slot."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True, slots=True)
class SetSlots:
    """The slot of each expert of a layer, [E]; -1 for one that is asleep."""

    layer: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class CompileRungs:
    """Start to compile what is missing of these."""

    buckets: tuple


@dataclass(frozen=True, slots=True)
class KeepRungs:
    """Free every rung but these."""

    buckets: tuple


type DeviceCommand = (
    WriteRow
    | SetMask
    | RunStep
    | ScorePrompt
    | MoveWeights
    | SetBalanceWeight
    | LeanRouter
    | WakeWeights
    | SetSlots
    | CompileRungs
    | KeepRungs
)

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(DeviceCommand.__value__)}
_TYPES = {kind: tuple(get_type_hints(kind).values()) for kind in _KINDS.values()}


def to_message(command: DeviceCommand) -> list[Any]:
    return [type(command).__name__, *(getattr(command, f.name) for f in fields(command))]


def from_message(message: list[Any]) -> DeviceCommand:
    """Raises BadFrame for what is no command."""
    kind = _KINDS.get(message[0])
    if kind is None:
        raise BadFrame(f"a command {message[0][:40]!r}, which is not known")
    values: list[Any] = [tuple(v) if isinstance(v, list) else v for v in message[1:]]
    wanted = _TYPES[kind]
    if len(values) != len(wanted) or not all(map(isinstance, values, wanted)):
        raise BadFrame(f"a command {kind.__name__} with other fields than it has")
    items = [item for value in values if isinstance(value, tuple) for item in value]
    if not all(isinstance(item, np.ndarray if kind is WriteRow else Bucket) for item in items):
        raise BadFrame(f"a command {kind.__name__} with a list of something else")
    return kind(*values)
