"""What the engine tells of the hosts that it spans. Frozen; imports no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostStatus:
    """state: `waiting` until the host has come, then `up`; `gone` when it was lost, `ended` when it was told to end.

    heard_s: seconds since its last sign. reason: of its end, for everybody; detail: what it said, for operators alone.
    """

    host_id: int
    address: str
    state: str
    heard_s: float | None = None
    reason: str = ""
    detail: str = ""
