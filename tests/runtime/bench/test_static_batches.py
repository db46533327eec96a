import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from runtime.bench.replay import Planned
from runtime.bench.static_batches import Batch, next_batch, play_static
from tests.runtime.bench.fake_loop import FakeLoop, fake_engine


def test_a_full_batch_starts_at_once_and_a_short_one_at_the_time_out() -> None:
    arrivals = [0.0, 0.1, 0.2, 5.0]
    assert next_batch(arrivals, 0, 0.0, 3, 1.0) == Batch(0.2, 0, 3)
    assert next_batch(arrivals, 0, 0.0, 4, 1.0) == Batch(1.0, 0, 3)
    assert next_batch(arrivals, 3, 2.0, 4, 1.0) == Batch(6.0, 3, 4)


def test_while_the_engine_is_busy_the_line_grows_but_the_batch_does_not() -> None:
    arrivals = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert next_batch(arrivals, 0, 10.0, 2, 0.05) == Batch(10.0, 0, 2)
    assert next_batch(arrivals, 0, 10.0, 8, 0.05) == Batch(10.0, 0, 5)


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=40),
    st.integers(1, 8),
    st.floats(0, 10),
    st.floats(0, 5),
)
def test_every_request_is_in_one_batch_in_order_and_none_starts_before_it_came(
    times: list[float], batch_size: int, timeout_s: float, run_s: float
) -> None:
    arrivals = sorted(times)
    first, free_s = 0, 0.0
    while first < len(arrivals):
        batch = next_batch(arrivals, first, free_s, batch_size, timeout_s)
        assert batch.first == first
        assert first < batch.end <= first + batch_size
        assert arrivals[batch.end - 1] <= batch.start_s
        assert batch.start_s >= free_s
        is_full = batch.end - batch.first == batch_size
        assert is_full or batch.start_s >= arrivals[first] + timeout_s
        first, free_s = batch.end, batch.start_s + run_s


def test_on_an_engine_nobody_joins_a_running_batch() -> None:
    loop = FakeLoop(step_s=0.004)
    engine = fake_engine(loop)
    plans = [Planned(0.0, (1, 2, 3), 2), *[Planned(0.05, (i, 2), 10) for i in range(4, 8)]]
    with Progress(disable=True) as progress:
        task = progress.add_task("static", total=len(plans))
        played = play_static(engine, plans, 2, 0.0, "static", progress, task)
    loop.stop()
    batches = [played.times[:1], played.times[1:3], played.times[3:]]
    for earlier, later in itertools.pairwise(batches):
        ended_s = max(t.finished_s or 0.0 for t in earlier)
        assert min(t.event_s[0] for t in later) > ended_s
    assert [t.num_tokens for t in played.times] == [2, 10, 10, 10, 10]
    # A request that waited for the batch before it has waited since it came.
    assert played.times[3].arrival_s == pytest.approx(played.times[1].arrival_s)
