import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.adaptive.observation import Observation
from runtime.bench.adaptive_traffic import Job, draw_jobs, read_lengths, steady_arrivals
from runtime.bench.virtual import StepTimes, VirtualEngine, VirtualMachine, VirtualRun
from runtime.bench.virtual_feeds import ClosedFeed, Feed, OpenFeed, StaticFeed
from runtime.config import EngineConfig, parse_config
from runtime.ladder.ladder import BucketLadder
from runtime.schedule.policy import SchedulePolicy

CONFIG = parse_config({"batch_processing": {"max_batch_size": 8}, "ladder": {"max_prefill_tokens": 128}})
LADDER = BucketLadder.from_config(CONFIG, 256)
TIMES = StepTimes(
    decode={b.rows: (0.001, 0.002 + 0.0005 * b.rows) for b in LADDER.decode},
    prefill={b.tokens: 0.001 + 1e-4 * b.tokens for b in LADDER.prefill},
    host_s=0.0,
)
MACHINE = VirtualMachine(LADDER, TIMES, max_context=256, num_pages=1 + 2 * 8 * 16, bytes_per_token=64)


def play(feed: Feed, rows: int | None = None, config: EngineConfig = CONFIG) -> VirtualRun:
    return VirtualEngine(MACHINE, config, rows, None).run(feed)


jobs_strategy = st.lists(
    st.builds(Job, st.floats(0, 2), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=30
).map(lambda jobs: sorted(jobs, key=lambda job: job.arrival_s))


def feeds(jobs: list[Job]) -> dict[str, tuple[Feed, int | None]]:
    return {
        "open": (OpenFeed(jobs), None),
        "fixed": (OpenFeed(jobs), 4),
        "closed": (ClosedFeed(jobs, 6), None),
        "static": (StaticFeed(jobs, 3, 0.05, is_open=True), 3),
        "static, full queue": (StaticFeed(jobs, 3, 0.05, is_open=False), 3),
    }


@settings(max_examples=25, deadline=None)
@given(jobs_strategy)
def test_every_request_ends_and_every_token_is_counted_once(jobs: list[Job]) -> None:
    for feed, rows in feeds(jobs).values():
        run = play(feed, rows)
        assert [(t.prompt_len, t.num_tokens) for t in run.times] == [
            (j.prompt_len, j.output_len) for j in jobs
        ]
        for times in run.times:
            assert times.is_ok
            assert times.arrival_s <= times.event_s[0]
            assert times.event_s == sorted(times.event_s)
            assert times.event_s[-1] == times.finished_s


def test_the_same_jobs_give_the_same_run() -> None:
    jobs = [Job(0.01 * i, 20 + i, 5 + i % 7) for i in range(40)]
    for name in feeds(jobs):
        first, again = (feeds(jobs)[name] for _ in range(2))
        assert play(*first) == play(*again)


def test_one_request_alone_takes_the_measured_times() -> None:
    run = play(OpenFeed([Job(1.0, 16, 9)]))
    times = run.times[0]
    prefill_s, (launch_s, step_s) = TIMES.prefill[16], TIMES.decode[1]
    assert times.event_s[0] == pytest.approx(1.0 + prefill_s)
    assert times.finished_s == pytest.approx(1.0 + prefill_s + launch_s + 8 * step_s)
    assert times.event_tokens == [1, 8]
    assert run.num_steps_by_rung == {LADDER.prefill[0].name: 1, "decode-1": 8}


def test_a_fixed_rung_is_the_only_one_used_and_bounds_who_runs() -> None:
    jobs = [Job(0.0, 16, 30) for _ in range(12)]
    run = play(OpenFeed(jobs), 4)
    assert {name for name in run.num_steps_by_rung if name.startswith("decode")} == {"decode-4"}
    ends = sorted(t.finished_s or 0.0 for t in run.times)
    starts = sorted(t.event_s[0] for t in run.times)
    assert starts[4] > ends[0]  # the fifth waits for a row
    with pytest.raises(ValueError, match="no decode rung of 7 rows"):
        play(OpenFeed(jobs), 7)


def test_nobody_joins_a_static_batch() -> None:
    jobs = [Job(0.001 * i, 16, 5 + 7 * (i % 3)) for i in range(11)]
    run = play(StaticFeed(jobs, 4, 0.1, is_open=True), 4)
    batches = [run.times[first : first + 4] for first in range(0, 11, 4)]
    for earlier, later in itertools.pairwise(batches):
        ended_s = max(t.finished_s or 0.0 for t in earlier)
        assert min(t.event_s[0] for t in later) > ended_s
    continuous = play(OpenFeed(jobs), 4)
    assert continuous.duration_s < run.duration_s  # or the comparison would be none


def test_a_static_batch_waits_for_company_up_to_the_time_out() -> None:
    run = play(StaticFeed([Job(1.0, 16, 1)], 4, 0.25, is_open=True), 4)
    assert run.times[0].event_s[0] == pytest.approx(1.25 + TIMES.prefill[16])


class Halving:
    """A controller that allows two rows once it has been asked."""

    def __init__(self) -> None:
        self.policy = SchedulePolicy(batch_size=8)
        self.seen: list[Observation] = []

    def is_due(self, now: float, /) -> bool:
        return not self.seen or now - self.seen[-1].time_s >= 0.05

    def tick(self, obs: Observation, now: float, /) -> SchedulePolicy:
        self.seen.append(obs)
        self.policy = SchedulePolicy(batch_size=2)
        return self.policy


def test_the_controller_sees_the_run_and_its_policy_holds() -> None:
    ticker = Halving()
    jobs = [Job(0.0, 16, 40) for _ in range(8)]
    run = VirtualEngine(MACHINE, CONFIG, None, lambda config, clock: ticker).run(OpenFeed(jobs))
    assert max(obs.num_running for obs in ticker.seen) == 2
    assert ticker.seen[1].num_waiting == 6
    assert ticker.seen[1].oldest_wait_s == pytest.approx(ticker.seen[1].time_s)
    assert ticker.seen[-1].decode_step_s_by_rows.keys() <= {1, 2}
    assert ticker.seen[-1].expected_len == 56
    assert "decode-8" not in run.num_steps_by_rung


def test_pages_that_run_out_preempt_and_nothing_is_lost() -> None:
    small = VirtualMachine(LADDER, TIMES, max_context=256, num_pages=1 + 20, bytes_per_token=64)
    jobs = [Job(0.0, 60, 60) for _ in range(8)]
    run = VirtualEngine(small, CONFIG, None, None).run(OpenFeed(jobs))
    assert run.num_preemptions > 0
    assert [t.num_tokens for t in run.times] == [60] * 8


def test_two_thousand_requests_take_seconds_at_most() -> None:
    lengths = read_lengths(None, 256)
    jobs = draw_jobs(lengths, steady_arrivals(2000, 40.0, seed=1), seed=1)
    start_s = time.process_time()
    run = play(OpenFeed(jobs))
    assert len(run.times) == 2000
    assert time.process_time() - start_s < 10
