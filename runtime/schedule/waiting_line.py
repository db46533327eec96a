"""WaitingLine: sequences without a row, in the order in which they will be admitted. Imports no JAX."""

from bisect import insort
from collections.abc import Iterable, Iterator

from runtime.schedule.policy import SchedulePolicy
from runtime.schedule.sequence import Sequence

ALIKE_SPAN = 64  # requests of the line that are looked at; more would make each step's decision slow


def line_order(sequence: Sequence) -> tuple[bool, int, int]:
    """Preempted ones first, then the smaller priority number, then first come first served."""
    return sequence.num_preemptions == 0, sequence.request.priority, sequence.number


def alike_first(line: Iterable[Sequence], policy: SchedulePolicy) -> Iterator[Sequence]:
    """The line with requests of like length brought behind its first one.

    Only within the batching window: those that arrived within `batch_window_s` of the first and share its priority
    may change places, at most `ALIKE_SPAN` of them. The first stays first, so nobody is passed over for ever.
    """
    rest = iter(line)
    first = next(rest, None)
    if first is None:
        return
    yield first
    if policy.length_multiple <= 0 or policy.batch_window_s <= 0 or first.num_preemptions:
        yield from rest
        return
    latest_s = first.request.arrival_s + policy.batch_window_s
    others: list[Sequence] = []
    beyond: Sequence | None = None
    for sequence in rest:
        is_near = (
            sequence.request.priority == first.request.priority and sequence.request.arrival_s <= latest_s
        )
        if not is_near or len(others) == ALIKE_SPAN:
            beyond = sequence
            break
        others.append(sequence)
    size = _length_class(first, policy.length_multiple)
    yield from sorted(others, key=lambda s: abs(_length_class(s, policy.length_multiple) - size))
    if beyond is not None:
        yield beyond
    yield from rest


def _length_class(sequence: Sequence, multiple: int) -> int:
    return -(-sequence.prefill_len // multiple)


class WaitingLine:
    """A sorted line."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=line_order)

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)

    @property
    def oldest_arrival_s(self) -> float | None:
        """Arrival of the oldest request that has never run; None when there is none."""
        return min((s.request.arrival_s for s in self._line if s.first_scheduled_s is None), default=None)

    def check_integrity(self) -> None:
        assert [line_order(s) for s in self._line] == sorted(map(line_order, self._line)), "line out of order"
