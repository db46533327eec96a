"""StepPlan: what one launch will compute. Decided by the scheduler, packed by the ladder. Imports no JAX."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from runtime.schedule.sequence import Sequence


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """One sequence's share of a step.

    Prefill: positions [start, start + num_tokens) of the sequence, start a multiple of the page size; `samples`
    says that the chunk ends the prefill, so one token is sampled. Decode: up to num_tokens decode steps, the first
    of which computes position start. `page_ids` are the sequence's pages at launch.
    """

    sequence: Sequence
    row: int
    start: int
    num_tokens: int
    page_ids: tuple[int, ...]
    samples: bool
    is_new_row: bool  # the row's sampling state must be written before this step

    @classmethod
    def launch(cls, sequence: Sequence, num_tokens: int, *, samples: bool) -> Self:
        """The chunk from where the sequence stands; from now on its row is no longer new."""
        assert sequence.row is not None
        is_new_row, sequence.is_row_new = sequence.is_row_new, False
        pages = tuple(sequence.page_ids)
        return cls(sequence, sequence.row, sequence.num_scheduled, num_tokens, pages, samples, is_new_row)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch. `num_steps` is 1 in prefill; in decode the number of tokens per row, a number and not a shape."""

    phase: Phase
    chunks: tuple[ScheduledChunk, ...]
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        """Real token positions of one step."""
        return sum(c.num_tokens for c in self.chunks) if self.phase is Phase.PREFILL else len(self.chunks)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the ready part of the ladder can take now; read anew each step because rungs get ready while we serve."""

    max_prefill_tokens: int  # positions of one prefill step, after aligning each chunk to the page size
    max_prefill_rows: int
    max_decode_rows: int
    max_decode_steps: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one launch as the host reads them: for each chunk of the plan the tokens it produced, in order.

    A decode row that met a stop id ends early: its list is shorter than num_steps. A prefill chunk that does not
    sample has an empty tuple.
    """

    token_ids: tuple[tuple[int, ...], ...]
