"""Several shards behind one line: random traffic as for one scheduler, and who is bound where."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from runtime.ladder.shard_packing import split_plan
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy
from runtime.schedule.shards import ShardedScheduler
from tests.runtime.schedule.test_scheduler import add, result_of
from tests.runtime.schedule.test_scheduler_properties import FakeDevice, SchedulerMachine

SHARDS = 2


def make(limits: StepLimits, num_shards: int = SHARDS, **changes) -> ShardedScheduler:
    settings_ = {
        "page_size": 4,
        "num_pages": 17,
        "num_rows": 2,
        "max_context": 64,
        "enable_prefix_cache": True,
    }
    return ShardedScheduler(num_shards, limits=lambda: limits, **(settings_ | changes))


LIMITS = StepLimits(max_prefill_tokens=32, max_prefill_rows=4, max_decode_rows=4, max_decode_steps=4)


def rows_of(plan: StepPlan | None) -> dict[str, int]:
    assert plan is not None
    return {c.sequence.request_id: c.row for c in plan.chunks}


def test_rows_go_to_the_emptier_shard_and_the_rest_waits_in_one_line() -> None:
    scheduler = make(LIMITS)
    for name in "abcde":
        add(scheduler, name, 6)
    plan = scheduler.schedule()
    assert rows_of(plan) == {"a": 0, "c": 1, "b": 2, "d": 3}
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_used_pages) == (1, 4, 8)
    assert list(scheduler.sequences)[-1] == "e", "the common line comes last"
    assert sorted(scheduler.sequences) == list("abcde")
    scheduler.check_integrity()
    scheduler.collect(plan, result_of(plan))
    assert scheduler.abort("b") is not None
    assert rows_of(scheduler.schedule()) == {"e": 2}


def test_a_prefix_is_served_where_its_pages_lie() -> None:
    scheduler = make(LIMITS)
    long = tuple(range(1, 14))
    first = add(scheduler, "first", 13, prompt_ids=long, max_tokens=1)
    other = add(scheduler, "other", 6, max_tokens=8)
    plan = scheduler.schedule()
    assert rows_of(plan) == {"first": 0, "other": 2}
    scheduler.collect(plan, result_of(plan))
    assert first.finish_reason is not None
    add(scheduler, "third", 5)  # shard 0 has fewer rows
    again = add(scheduler, "again", 13, prompt_ids=long)
    plan = scheduler.schedule()
    assert rows_of(plan)["again"] in (0, 1)
    assert again.num_cached == 12
    assert other.row == 2


def test_all_shards_decode_as_many_steps_as_the_one_that_wants_fewest() -> None:
    scheduler = make(LIMITS)
    add(scheduler, "short", 4, max_tokens=2)
    add(scheduler, "long", 4, max_tokens=9)
    plan = scheduler.schedule()
    scheduler.collect(plan, result_of(plan))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.phase is Phase.DECODE
    assert [c.num_tokens for c in plan.chunks] == [1, 1]


def test_no_more_run_than_the_batch_size_says() -> None:
    """Parts are rounded up, the whole is not."""
    scheduler = make(LIMITS)
    scheduler.policy = SchedulePolicy(batch_size=1)
    for name in "abc":
        add(scheduler, name, 6)
    assert rows_of(scheduler.schedule()) == {"a": 0}
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_a_shard_without_work_has_no_part() -> None:
    scheduler = make(LIMITS)
    scheduler.add(Request("one", (1, 2, 3), SamplingParams(max_tokens=3)))
    plan = scheduler.schedule()
    assert rows_of(plan) == {"one": 0}
    scheduler.collect(plan, result_of(plan))
    assert rows_of(scheduler.schedule()) == {"one": 0}


class ShardedDevice:
    """A device for each shard, which gets its part as the engine gives it out."""

    def __init__(self, page_size: int, rows_per_shard: int) -> None:
        self.rows_per_shard = rows_per_shard
        self.devices = [FakeDevice(page_size) for _ in range(SHARDS)]

    def run(self, plan: StepPlan) -> StepResult:
        parts = split_plan(plan, SHARDS, self.rows_per_shard)
        results = [device.run(part) for device, part in zip(self.devices, parts, strict=True)]
        return StepResult(tuple(tokens for result in results for tokens in result.token_ids))


class ShardedMachine(SchedulerMachine):
    """The same calls in any order; the order of the line is the binding's, tested above."""

    first_limits = StepLimits(32, 6, 8, 4)

    @initialize(
        pool_tokens=st.integers(12, 64),
        num_rows=st.integers(1, 3),
        page_size=st.sampled_from([1, 2, 4]),
        has_cache=st.sampled_from([True, True, False]),
    )
    def start(self, pool_tokens: int, num_rows: int, page_size: int, has_cache: bool) -> None:
        self.rows_per_shard = num_rows
        super().start(pool_tokens, num_rows, page_size, has_cache)

    def make_scheduler(self, **settings: Any) -> ShardedScheduler:
        return ShardedScheduler(SHARDS, **settings)

    def make_device(self, num_rows: int) -> ShardedDevice:
        return ShardedDevice(self.page_size, num_rows)

    @rule(
        tokens=st.integers(4, 24),
        rows=st.integers(1, 4),
        decode_rows=st.integers(1, 5),
        steps=st.integers(1, 8),
    )
    def change_limits(self, tokens: int, rows: int, decode_rows: int, steps: int) -> None:
        self.limits = StepLimits(SHARDS * tokens, SHARDS * rows, SHARDS * decode_rows, steps)

    def check_plan(self, plan: StepPlan) -> None:
        everybody = self.sequences
        for shard in range(SHARDS):
            chunks = tuple(c for c in plan.chunks if c.row // self.rows_per_shard == shard)
            if chunks:
                here = range(shard * self.rows_per_shard, (shard + 1) * self.rows_per_shard)
                self.sequences = [s for s in everybody if s.row in here]
                super().check_plan(replace(plan, chunks=chunks))
        self.sequences = everybody

    def check_order(self, plan, line_before) -> None:
        """Shards admit in their own order."""


TestSharded = ShardedMachine.TestCase
TestSharded.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
