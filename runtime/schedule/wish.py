"""Wish: what a scheduler could launch next, before the phase is chosen. Imports no JAX."""

from dataclasses import dataclass

from runtime.schedule.plan import StepLimits
from runtime.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of a prefill step that is decided but not yet carried out."""

    sequence: Sequence
    start: int
    end: int
    cached: list[int] | None  # pages to start with, for a sequence that has yet to be admitted


@dataclass(frozen=True, slots=True)
class Wish:
    """shares: of the prefill step that is ready; rows: that could decode, those that decoded longest ago first.

    is_prefill_near: whether prefill work waits, ready or held back for company.
    """

    shares: tuple[Share, ...]
    rows: tuple[Sequence, ...]
    is_prefill_near: bool
    limits: StepLimits

    @property
    def can_decode(self) -> bool:
        return bool(self.rows)
