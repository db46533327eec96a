"""WaitingLine: sequences without a row, in the order in which they will be admitted. Imports no JAX."""

from bisect import insort
from collections.abc import Iterator

from runtime.schedule.sequence import Sequence


def line_order(sequence: Sequence) -> tuple[bool, int, int]:
    """Preempted ones first, then the smaller priority number, then first come first served."""
    return sequence.num_preemptions == 0, sequence.request.priority, sequence.number


class WaitingLine:
    """A sorted line with its length in tokens."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self.num_tokens = 0  # prompt + allowed output of everything in line

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=line_order)
        self.num_tokens += sequence.max_len

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)
        self.num_tokens -= sequence.max_len

    def check_integrity(self) -> None:
        assert self.num_tokens == sum(s.max_len for s in self._line), "token count of the line is off"
        assert [line_order(s) for s in self._line] == sorted(map(line_order, self._line)), "line out of order"
