"""The gate is exact: all or none, by count and by tokens, from many threads."""

import threading

import pytest

from runtime.engine.admission import AdmissionGate
from runtime.errors import QueueFull
from runtime.request import Request, SamplingParams


def request(name: str, tokens: int = 10) -> Request:
    return Request(name, (1,) * (tokens - 4), SamplingParams(max_tokens=4))


def test_bounds_by_count_and_tokens():
    gate = AdmissionGate(3, 25, lambda: 0.0)
    gate.enter([request("a"), request("b")])
    with pytest.raises(QueueFull, match="20 tokens of 25") as caught:
        gate.enter([request("c")])
    assert caught.value.retry_after_s == 5.0
    gate.leave("a")
    gate.leave("a")
    gate.enter([request("c")])
    assert (gate.num_waiting, gate.waiting_tokens, gate.num_rejected) == (2, 20, 1)


def test_all_or_none():
    gate = AdmissionGate(2, 1000, lambda: 0.0)
    gate.enter([request("a")])
    with pytest.raises(QueueFull):
        gate.enter([request("b"), request("c")])
    assert gate.num_waiting == 1


def test_an_empty_line_takes_a_request_larger_than_the_bound():
    gate = AdmissionGate(1, 5, lambda: 0.0)
    gate.enter([request("a", 50)])
    assert gate.num_waiting == 1


def test_retry_after_follows_the_drain_rate():
    gate = AdmissionGate(1, 1000, lambda: 10.0)
    gate.enter([request("a", 400)])
    with pytest.raises(QueueFull) as caught:
        gate.enter([request("b")])
    assert caught.value.retry_after_s == 20.0


def test_threads_never_overshoot():
    gate = AdmissionGate(50, 10**6, lambda: 0.0)
    peaks = []

    def work(i: int) -> None:
        for j in range(50):
            try:
                gate.enter([request(f"{i}-{j}")])
            except QueueFull:
                continue
            peaks.append(gate.num_waiting)
            gate.leave(f"{i}-{j - 1}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert max(peaks) <= 50
