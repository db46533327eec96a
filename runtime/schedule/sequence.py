"""Sequence: the one mutable record of a request's progress, owned by the scheduler. Imports no JAX."""

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.request import FinishReason, Request


class SequenceStatus(Enum):
    WAITING = auto()  # in the line; holds no row and no pages
    RUNNING = auto()  # holds a row and pages
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one request.

    Tokens are prompt + outputs. `num_scheduled` counts positions whose KV has been launched (or taken from the
    prefix cache); `num_pending` counts output tokens launched but not yet read by the host. A preempted sequence
    goes back to WAITING with its outputs kept: they are then part of what it must prefill.
    """

    request: Request
    number: int = 0  # order of arrival
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    prefill_end: int = 0  # where this admission's prefill ends: prefill_len when it got its row
    row: int | None = None  # slot of the device's row state
    is_row_new: bool = True  # nothing has been launched in the row since the sequence got it
    page_ids: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of the full pages, chained
    num_offered_pages: int = 0  # leading pages that were matched in, or offered to, the prefix cache
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prefill_len(self) -> int:
        """Positions to compute before decoding: the prompt, and after a preemption the known outputs too."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether positions of this admission's prefill are still to be launched."""
        return self.num_scheduled < self.prefill_end

    @property
    def needs_host(self) -> bool:
        """Whether the host must read the last token before it can launch the next."""
        return self.request.params.grammar is not None and self.num_pending > 0

    @property
    def num_settled(self) -> int:
        """Leading positions whose token is known and whose KV the launches so far certainly write.

        The last known output is not one of them: its KV is written by the step that samples its successor, and
        a row that met a stop id has no such step.
        """
        return min(self.num_scheduled, max(self.prefill_end, self.prefill_len - 1))

    @property
    def num_generated(self) -> int:
        """Outputs launched, read or not."""
        return len(self.output_ids) + self.num_pending

    @property
    def remaining(self) -> int:
        """Output tokens that may still be launched."""
        return self.request.params.max_tokens - self.num_generated

    @property
    def max_len(self) -> int:
        return len(self.request.prompt_ids) + self.request.params.max_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known tokens of positions [start, end)."""
        prompt = self.request.prompt_ids
        head = list(prompt[start:end])
        base = len(prompt)
        return head + self.output_ids[max(0, start - base) : max(0, end - base)]

    def take(
        self, token_ids: tuple[int, ...], promised: int, eos_ids: frozenset[int]
    ) -> tuple[int, FinishReason | None]:
        """Take in the tokens of a launch that promised so many: (how many count, why the sequence ends, if it does).

        Fewer tokens than promised mean that the device has masked the row: nothing more will come of it.
        """
        params = self.request.params
        stop_ids = params.all_stop_ids(eos_ids)
        self.num_pending -= promised
        for num_taken, token_id in enumerate(token_ids, start=1):
            self.output_ids.append(token_id)
            if token_id in stop_ids and len(self.output_ids) >= params.min_tokens:
                return num_taken, FinishReason.STOP
            if len(self.output_ids) >= params.max_tokens:
                return num_taken, FinishReason.LENGTH
        return len(token_ids), FinishReason.STOP if len(token_ids) < promised else None

    def check_integrity(self, *, is_waiting: bool) -> None:
        """Raises AssertionError if status, row and counts contradict each other."""
        name = self.request_id
        if is_waiting:
            assert self.status is SequenceStatus.WAITING, f"{name} is in line but {self.status}"
            assert self.row is None, f"{name} waits in row {self.row}"
            assert self.num_scheduled == self.num_pending == len(self.page_ids) == 0, f"{name} waits with KV"
            return
        assert self.status is SequenceStatus.RUNNING, f"{name} has a row but is {self.status}"
        assert self.remaining >= 0, f"{name} has launched {-self.remaining} tokens too many"
        if not self.is_prefilling:
            assert self.num_scheduled == self.prefill_len + self.num_pending - 1, f"{name}: positions"
