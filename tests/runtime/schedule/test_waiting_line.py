"""Who is next."""

from runtime.request import Request, SamplingParams
from runtime.schedule.sequence import Sequence
from runtime.schedule.waiting_line import WaitingLine


def make_sequence(number: int, priority: int = 0, num_preemptions: int = 0) -> Sequence:
    request = Request(f"r{number}", (1, 2, 3), SamplingParams(max_tokens=5), priority=priority)
    return Sequence(request, number=number, num_preemptions=num_preemptions)


def test_preempted_then_priority_then_arrival():
    line = WaitingLine()
    for sequence in (
        make_sequence(5),
        make_sequence(3, priority=1),
        make_sequence(4, priority=-1),
        make_sequence(2),
        make_sequence(1, num_preemptions=1),
        make_sequence(0, num_preemptions=3),
    ):
        line.add(sequence)
    line.check_integrity()
    assert [s.number for s in line] == [0, 1, 4, 2, 5, 3]


def test_a_sequence_leaves_the_line():
    line = WaitingLine()
    a, b = make_sequence(0), make_sequence(1)
    line.add(a)
    line.add(b)
    line.remove(a)
    assert (list(line), len(line)) == ([b], 1)
    line.check_integrity()
