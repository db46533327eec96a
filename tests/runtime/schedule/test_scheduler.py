"""Exact small answers: which chunks, rows and pages, in which order, and who gives way."""

import pytest

from runtime.errors import ContextTooLong, InvalidRequest
from runtime.request import FinishReason, GrammarSpec, Request, SamplingParams
from runtime.schedule.plan import Phase, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import Sequence, SequenceStatus

EOS = 999
LIMITS = StepLimits(max_prefill_tokens=16, max_prefill_rows=4, max_decode_rows=8, max_decode_steps=4)


def make_scheduler(limits: StepLimits = LIMITS, **changes) -> Scheduler:
    settings = {
        "page_size": 4,
        "num_pages": 33,
        "num_rows": 4,
        "max_context": 64,
        "enable_prefix_cache": False,
        "clock": lambda: 7.0,
        "eos_token_ids": frozenset({EOS}),
    }
    return Scheduler(limits=lambda: limits, **(settings | changes))


def add(scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 8, **changes) -> Sequence:
    """A request whose prompt shares nothing with that of another name."""
    prompt = tuple(ord(name[0]) * 100 + i for i in range(prompt_len))
    of_request = {
        k: changes.pop(k)
        for k in changes.keys() & {"priority", "deadline_s", "cache_salt", "prompt_ids", "arrival_s"}
    }
    params = SamplingParams(max_tokens=max_tokens, **changes)
    return scheduler.add(Request(**{"request_id": name, "prompt_ids": prompt, "params": params} | of_request))


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_integrity()
    return plan


def result_of(plan: StepPlan, token_id: int = 1) -> StepResult:
    """Every row yields all it was asked for."""
    counts = [c.num_tokens if plan.phase is Phase.DECODE else int(c.samples) for c in plan.chunks]
    return StepResult(tuple((token_id,) * n for n in counts))


def collect(scheduler: Scheduler, plan: StepPlan, *tokens: tuple[int, ...]):
    news = scheduler.collect(plan, StepResult(tokens) if tokens else result_of(plan))
    scheduler.check_integrity()
    return {s.request_id: t for s, t in news}


def run(scheduler: Scheduler) -> StepPlan:
    plan = launch(scheduler)
    collect(scheduler, plan)
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.sequence.request_id, c.start, c.num_tokens) for c in plan.chunks]


# Prefill


def test_one_request_from_line_to_end():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt_len=6, max_tokens=4)
    assert (scheduler.num_waiting, scheduler.is_idle) == (1, False)
    prefill = launch(scheduler)
    (chunk,) = prefill.chunks
    assert (prefill.phase, prefill.num_steps, prefill.num_tokens) == (Phase.PREFILL, 1, 6)
    assert (chunk.row, chunk.start, chunk.num_tokens, chunk.page_ids) == (0, 0, 6, (1, 2))
    assert chunk.samples
    assert chunk.is_new_row
    assert (a.num_scheduled, a.num_pending, a.remaining, a.first_scheduled_s) == (6, 1, 3, 7.0)

    decode = launch(scheduler)  # the first token is not known yet
    (chunk,) = decode.chunks
    assert (decode.phase, decode.num_steps) == (Phase.DECODE, 3)
    assert (chunk.row, chunk.start, chunk.num_tokens, chunk.page_ids) == (0, 6, 3, (1, 2, 3))
    assert not chunk.is_new_row
    assert scheduler.schedule() is None

    assert collect(scheduler, prefill) == {"a": (1,)}
    assert collect(scheduler, decode) == {"a": (1, 1, 1)}
    assert (a.status, a.finish_reason) == (SequenceStatus.FINISHED, FinishReason.LENGTH)
    assert a.output_ids == [1, 1, 1, 1]
    assert scheduler.is_idle
    assert scheduler.num_used_pages == 0


def test_a_long_prompt_goes_in_chunks_and_the_next_one_fills_the_step():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt_len=37)
    add(scheduler, "b", prompt_len=15)
    add(scheduler, "c", prompt_len=3)
    assert shape(run(scheduler)) == [("a", 0, 16)]
    assert shape(run(scheduler)) == [("a", 16, 16)]
    last = run(scheduler)  # the last 5 of a take two of the four pages in the budget
    assert shape(last) == [("a", 32, 5), ("b", 0, 8)]
    assert [c.samples for c in last.chunks] == [True, False]
    assert [c.is_new_row for c in last.chunks] == [False, True]
    assert shape(run(scheduler)) == [("b", 8, 7), ("c", 0, 3)]


def test_the_next_chunk_is_launched_before_the_last_one_is_read():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt_len=20)
    first, second = launch(scheduler), launch(scheduler)
    assert (shape(first), shape(second)) == ([("a", 0, 16)], [("a", 16, 4)])
    assert collect(scheduler, first, ()) == {}
    assert collect(scheduler, second, (5,)) == {"a": (5,)}


def test_chunks_are_bounded_by_rows_of_the_step_and_by_rows_of_the_device():
    scheduler = make_scheduler(StepLimits(100, 2, 8, 4), num_rows=3)
    for name in "abcd":
        add(scheduler, name, prompt_len=2)
    assert shape(launch(scheduler)) == [("a", 0, 2), ("b", 0, 2)]
    assert shape(launch(scheduler)) == [("c", 0, 2)]
    assert scheduler.num_waiting == 1


def test_a_budget_that_is_not_whole_pages_is_rounded_down():
    scheduler = make_scheduler(StepLimits(11, 4, 8, 4))
    add(scheduler, "a", prompt_len=12)
    assert shape(launch(scheduler)) == [("a", 0, 8)]


def test_batch_size_is_live():
    scheduler = make_scheduler()
    scheduler.policy = SchedulePolicy(batch_size=1)
    add(scheduler, "a", prompt_len=2)
    add(scheduler, "b", prompt_len=2)
    assert shape(run(scheduler)) == [("a", 0, 2)]
    scheduler.policy = SchedulePolicy(batch_size=2)
    assert shape(run(scheduler)) == [("b", 0, 2)]
    scheduler.policy = SchedulePolicy(batch_size=0)  # at least one always runs
    scheduler.abort("a")
    scheduler.abort("b")
    add(scheduler, "c", prompt_len=2)
    assert shape(run(scheduler)) == [("c", 0, 2)]


def test_the_head_of_the_line_is_not_passed_by_a_smaller_request():
    scheduler = make_scheduler(num_pages=9)
    add(scheduler, "a", prompt_len=16, max_tokens=4)
    run(scheduler)
    add(scheduler, "b", prompt_len=16, max_tokens=4)  # 4 pages are free, but 1 of them is spared for a
    add(scheduler, "c", prompt_len=1, max_tokens=1)
    assert launch(scheduler).phase is Phase.DECODE
    assert scheduler.num_waiting == 2


# Prefix cache


def test_a_prompt_shares_the_pages_of_an_earlier_one_and_computes_the_rest():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=10)
    assert launch(scheduler).chunks[0].page_ids == (1, 2, 3)
    b = add(scheduler, "b", 0, prompt_ids=(*a.request.prompt_ids[:8], 5, 6))
    plan = launch(scheduler)  # a's step is still in flight: this one runs after it
    assert shape(plan) == [("b", 8, 2)]
    assert plan.chunks[0].page_ids == (1, 2, 4)
    assert b.num_cached == 8
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (20, 8)


def test_the_last_position_is_always_computed():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=8)
    launch(scheduler)
    add(scheduler, "b", 0, prompt_ids=a.request.prompt_ids)
    assert shape(launch(scheduler)) == [("b", 4, 4)]


def test_no_sharing_with_another_salt_nor_where_the_prompt_is_scored():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=10)
    launch(scheduler)
    add(scheduler, "b", 0, prompt_ids=a.request.prompt_ids, cache_salt="other")
    assert shape(launch(scheduler)) == [("b", 0, 10)]
    add(scheduler, "c", 0, prompt_ids=a.request.prompt_ids, prompt_logprobs=0)
    scheduler.policy = SchedulePolicy(max_prefills_in_a_row=9)
    assert shape(launch(scheduler)) == [("c", 0, 10)]


def test_copies_of_a_prompt_wait_for_the_first_one_and_others_do_not():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=10)
    for name in "bc":
        add(scheduler, name, 0, prompt_ids=a.request.prompt_ids)
    add(scheduler, "d", prompt_len=3)
    assert shape(launch(scheduler)) == [("a", 0, 10), ("d", 0, 3)]
    plan = launch(scheduler)
    assert shape(plan) == [("b", 8, 2), ("c", 8, 2)]
    assert [c.page_ids for c in plan.chunks] == [(1, 2, 5), (1, 2, 6)]


def test_who_waits_for_a_page_does_not_lose_the_row_to_a_later_one():
    scheduler = make_scheduler(enable_prefix_cache=True, num_rows=2)
    a = add(scheduler, "a", prompt_len=10)
    add(scheduler, "b", 0, prompt_ids=a.request.prompt_ids)
    add(scheduler, "c", prompt_len=3)
    assert shape(launch(scheduler)) == [("a", 0, 10)]
    assert shape(launch(scheduler)) == [("b", 8, 2)]


def test_full_pages_of_the_output_are_found_by_the_next_turn():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=6, max_tokens=7)
    while not scheduler.is_idle:
        run(scheduler)
    assert scheduler.num_cached_pages == 3  # 6 + 7 tokens, the last of them without KV: 12 positions
    add(scheduler, "b", 0, prompt_ids=(*a.request.prompt_ids, *a.output_ids, 5))
    assert shape(launch(scheduler)) == [("b", 12, 2)]


def test_a_stop_token_has_no_kv_and_its_page_is_not_cached():
    scheduler = make_scheduler(enable_prefix_cache=True)
    add(scheduler, "a", prompt_len=6, max_tokens=7)
    run(scheduler)
    plan = launch(scheduler)
    assert collect(scheduler, plan, (EOS,)) == {"a": (EOS,)}  # position 7 would fill the second page
    assert scheduler.num_cached_pages == 1


def test_a_step_admits_two_and_the_first_does_not_evict_what_the_second_shares():
    scheduler = make_scheduler(enable_prefix_cache=True, num_pages=7)
    scheduler.policy = SchedulePolicy(spare_pages_per_row=0)
    x = add(scheduler, "x", prompt_len=8, max_tokens=1)
    run(scheduler)
    add(scheduler, "y", prompt_len=8, max_tokens=1)
    run(scheduler)  # free: 5 and 6 blank, then 2, 1 of x and 4, 3 of y
    add(scheduler, "a", prompt_len=12)
    add(scheduler, "b", 0, prompt_ids=(*x.request.prompt_ids, 5))
    plan = launch(scheduler)
    assert shape(plan) == [("a", 0, 12), ("b", 8, 1)]
    assert [c.page_ids for c in plan.chunks] == [(5, 6, 4), (1, 2, 3)]


def test_switching_the_prefix_cache_off_forgets_it():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=10)
    run(scheduler)
    scheduler.set_prefix_cache(False)
    assert scheduler.num_cached_pages == 0
    add(scheduler, "b", 0, prompt_ids=a.request.prompt_ids)
    assert shape(run(scheduler)) == [("b", 0, 10)]


def test_what_ran_while_weights_changed_is_shared_with_nobody_after_it():
    scheduler = make_scheduler(enable_prefix_cache=True)
    a = add(scheduler, "a", prompt_len=24, max_tokens=3)
    launched = launch(scheduler)
    assert shape(launched) == [("a", 0, 16)]
    scheduler.clear_prefix_cache()
    collect(scheduler, launched)
    while not scheduler.is_idle:
        run(scheduler)
    assert scheduler.num_cached_pages == 0
    for name, first in (
        ("b", ("b", 0, 16)),
        ("c", ("c", 24, 1)),
    ):  # the next one computes, and shares, all anew
        add(scheduler, name, 0, prompt_ids=(*a.request.prompt_ids, 5), max_tokens=1)
        assert shape(run(scheduler)) == [first]
        while not scheduler.is_idle:
            run(scheduler)


# Decode


def test_prefill_and_decode_take_turns():
    scheduler = make_scheduler(num_rows=8)
    scheduler.policy = SchedulePolicy(max_prefills_in_a_row=2, steps_while_waiting=1)
    add(scheduler, "a", prompt_len=2, max_tokens=30)
    run(scheduler)
    for name in "bcdef":
        add(scheduler, name, prompt_len=16, max_tokens=30)
    plans = [run(scheduler) for _ in range(8)]
    assert [p.phase[0] for p in plans] == ["p", "p", "d", "p", "p", "d", "p", "d"]
    assert [p.num_steps for p in plans if p.phase is Phase.DECODE] == [1, 1, 4]


def test_a_row_near_its_end_does_not_hold_back_the_others():
    scheduler = make_scheduler(num_rows=8)
    add(scheduler, "a", prompt_len=2, max_tokens=2)
    for name in "bcd":
        add(scheduler, name, prompt_len=2, max_tokens=20)
    run(scheduler)
    plan = launch(scheduler)
    assert plan.num_steps == 4
    assert [c.num_tokens for c in plan.chunks] == [1, 4, 4, 4]


def test_a_full_house_with_a_line_reads_when_the_first_row_may_end():
    scheduler = make_scheduler(StepLimits(64, 8, 8, 16), num_rows=2)
    add(scheduler, "a", prompt_len=2, max_tokens=6)
    add(scheduler, "b", prompt_len=2, max_tokens=30)
    run(scheduler)
    add(scheduler, "c", prompt_len=2)
    assert run(scheduler).num_steps == 5
    assert shape(run(scheduler)) == [("c", 0, 2)]


def test_rows_take_turns_when_the_step_is_smaller_than_the_house():
    scheduler = make_scheduler(StepLimits(64, 8, 2, 1))
    for name in "abc":
        add(scheduler, name, prompt_len=2)
    run(scheduler)
    turns = ["".join(r for r, _, _ in shape(run(scheduler))) for _ in range(3)]
    assert turns == ["ab", "ac", "bc"]


def test_a_grammar_row_is_launched_only_after_its_token_is_read():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt_len=2, grammar=GrammarSpec("regex", "x*"))
    add(scheduler, "b", prompt_len=2)
    prefill = launch(scheduler)
    between = launch(scheduler)
    assert (shape(between), between.num_steps) == ([("b", 2, 2)], 2)  # few steps: a is ready soon
    collect(scheduler, prefill)
    both = launch(scheduler)
    assert (shape(both), both.num_steps) == ([("a", 2, 1), ("b", 4, 1)], 1)


def test_a_stop_id_ends_a_row_early_and_later_launches_are_ignored():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt_len=2, max_tokens=20)
    b = add(scheduler, "b", prompt_len=2, max_tokens=20, stop_token_ids=(77,), ignore_eos=True)
    run(scheduler)
    first, second = launch(scheduler), launch(scheduler)
    assert collect(scheduler, first, (1, EOS), (1, EOS, 1, 77)) == {"a": (1, EOS), "b": (1, EOS, 1, 77)}
    assert [s.finish_reason for s in (a, b)] == [FinishReason.STOP] * 2
    assert collect(scheduler, second, (), ()) == {}
    assert a.output_ids == [1, 1, EOS]
    assert scheduler.is_idle


def test_a_row_that_the_device_ended_is_over():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt_len=2, max_tokens=20)
    run(scheduler)
    assert collect(scheduler, launch(scheduler), (1, 1)) == {"a": (1, 1)}
    assert a.finish_reason is FinishReason.STOP


def test_tokens_after_a_stop_id_and_before_min_tokens():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt_len=2, max_tokens=20, min_tokens=3)
    run(scheduler)
    assert collect(scheduler, launch(scheduler), (EOS, EOS, 1, 1)) == {"a": (EOS, EOS)}
    assert a.finish_reason is FinishReason.STOP


# Ends


def test_abort_frees_row_and_pages_at_once_and_the_next_launch_may_use_them():
    scheduler = make_scheduler(num_rows=1, num_pages=5)
    add(scheduler, "a", prompt_len=12, max_tokens=4)
    b = add(scheduler, "b", prompt_len=12, max_tokens=4)
    run(scheduler)
    in_flight = launch(scheduler)
    aborted = scheduler.abort("a")
    assert aborted is not None
    assert aborted.finish_reason is FinishReason.ABORT
    assert (aborted.row, aborted.page_ids) == (None, [])
    assert scheduler.abort("a") is None
    (chunk,) = launch(scheduler).chunks
    assert (chunk.sequence, chunk.row, chunk.page_ids, chunk.is_new_row) == (b, 0, (1, 2, 3), True)
    assert collect(scheduler, in_flight) == {}


def test_finish_from_the_host_while_a_launch_is_in_flight():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt_len=2)
    run(scheduler)
    in_flight = launch(scheduler)
    scheduler.finish(a, FinishReason.STOP)
    scheduler.finish(a, FinishReason.LENGTH)
    assert a.finish_reason is FinishReason.STOP
    assert not scheduler.is_idle
    assert collect(scheduler, in_flight) == {}
    assert scheduler.is_idle


def test_expire_takes_the_waiting_only():
    scheduler = make_scheduler(num_rows=1)
    add(scheduler, "a", prompt_len=2, deadline_s=5.0)
    run(scheduler)
    b = add(scheduler, "b", prompt_len=2, deadline_s=5.0)
    add(scheduler, "c", prompt_len=2, deadline_s=6.0)
    add(scheduler, "d", prompt_len=2)
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(5.0) == [b]
    assert (b.status, b.finish_reason) == (SequenceStatus.FINISHED, FinishReason.ERROR)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.check_integrity()


# Preemption


def make_pressed(*prompt_lens: int, **changes) -> tuple[Scheduler, dict[str, Sequence]]:
    """Three running sequences a, b, c in all of 6 pages, two for each."""
    scheduler = make_scheduler(StepLimits(64, 8, 8, 1), num_pages=7, max_context=24, **changes)
    scheduler.policy = SchedulePolicy(spare_pages_per_row=0)
    lens = zip("abc", prompt_lens, strict=True)
    sequences = {n: add(scheduler, n, prompt_len=k, max_tokens=8, deadline_s=99.0) for n, k in lens}
    prefill = launch(scheduler)
    assert len(prefill.chunks) == 3
    assert scheduler.schedule() is None  # nobody is preempted before what is in flight is read
    collect(scheduler, prefill)
    return scheduler, sequences


def test_the_latest_gives_way_among_equals_and_keeps_its_outputs():
    scheduler, sequences = make_pressed(8, 8, 8)
    assert shape(run(scheduler)) == [("a", 8, 1), ("b", 8, 1)]
    c = sequences["c"]
    assert (c.status, c.num_preemptions, c.output_ids) == (SequenceStatus.WAITING, 1, [1])
    assert scheduler.expire(100.0) == []  # it has answered already
    scheduler.abort("a")
    scheduler.abort("b")
    add(scheduler, "z", prompt_len=1)
    (c_again, _) = launch(scheduler).chunks  # first in line, and its output is part of the prefill
    assert (c_again.sequence, c_again.start, c_again.num_tokens) == (c, 0, 9)
    assert c_again.is_new_row
    assert c.first_scheduled_s is not None
    assert c.num_cached == 0


def test_who_loses_the_least_gives_way_but_never_the_oldest():
    scheduler = make_scheduler(StepLimits(64, 8, 8, 1), num_pages=8, max_context=28)
    scheduler.policy = SchedulePolicy(spare_pages_per_row=0)
    names = {"a": 4, "b": 8, "c": 16}
    sequences = {name: add(scheduler, name, prompt_len=n, max_tokens=8) for name, n in names.items()}
    run(scheduler)
    assert shape(run(scheduler)) == [("a", 4, 1), ("c", 16, 1)]
    assert sequences["b"].status is SequenceStatus.WAITING  # a would lose less, but it is the oldest


def test_a_preempted_sequence_finds_its_pages_again_if_nobody_took_them():
    scheduler, sequences = make_pressed(8, 7, 8, enable_prefix_cache=True)
    assert shape(run(scheduler)) == [("a", 8, 1), ("b", 7, 1)]  # b needs no page yet
    scheduler.abort("a")
    scheduler.abort("b")
    (chunk,) = launch(scheduler).chunks
    # c gave back pages 5 and 6; a took the end of it, 6, and the beginning is still there.
    assert (chunk.sequence, chunk.start, chunk.num_tokens) == (sequences["c"], 4, 5)
    assert chunk.page_ids[0] == 5
    assert sequences["c"].num_cached == 0  # counts the first admission only


def test_prefill_goes_on_where_every_row_that_decodes_had_to_give_way():
    scheduler = make_scheduler(num_pages=7, max_context=24)
    scheduler.policy = SchedulePolicy(max_prefills_in_a_row=1, spare_pages_per_row=0)
    b = add(scheduler, "b", prompt_len=4)
    run(scheduler)
    add(scheduler, "a", prompt_len=20, max_tokens=4, priority=-1)
    assert shape(run(scheduler)) == [("a", 0, 16)]
    assert shape(run(scheduler)) == [("a", 16, 4)]  # it was the turn of b, for which there is no page
    assert b.status is SequenceStatus.WAITING
    while not scheduler.is_idle:
        run(scheduler)
    assert b.output_ids == [1] * 8


# Refusals


def test_add_refuses_what_can_never_be_served():
    scheduler = make_scheduler(num_pages=9)
    with pytest.raises(ContextTooLong, match=r"60 tokens and max_tokens is 5, 65 in all; .* holds 64"):
        add(scheduler, "a", prompt_len=60, max_tokens=5)
    with pytest.raises(InvalidRequest, match="needs 9 KV pages, the pool has 8"):
        add(scheduler, "a", prompt_len=30, max_tokens=4)
    with pytest.raises(InvalidRequest, match="no tokens"):
        add(scheduler, "a", prompt_len=0)
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        add(scheduler, "a", prompt_len=1, max_tokens=0)
    add(scheduler, "a", prompt_len=30, max_tokens=3)  # the last token needs no page
    with pytest.raises(InvalidRequest, match="in use"):
        add(scheduler, "a", prompt_len=1)
    assert scheduler.num_waiting == 1


def test_collect_refuses_a_plan_out_of_turn():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt_len=20)
    first, second = launch(scheduler), launch(scheduler)
    with pytest.raises(ValueError, match="in the order"):
        scheduler.collect(second, result_of(second))
    with pytest.raises(ValueError, match="0 token lists for 1 chunks"):
        scheduler.collect(first, StepResult(()))
    collect(scheduler, first)


def test_priority_goes_before_arrival():
    scheduler = make_scheduler(num_rows=1)
    add(scheduler, "a", prompt_len=2, priority=1)
    add(scheduler, "b", prompt_len=2)
    assert shape(launch(scheduler)) == [("b", 0, 2)]


def test_micro_batch_size_bounds_the_requests_of_one_prefill():
    scheduler = make_scheduler(policy=SchedulePolicy(micro_batch_size=2))
    for name in "abc":
        add(scheduler, name, prompt_len=2)
    assert shape(run(scheduler)) == [("a", 0, 2), ("b", 0, 2)]
    assert shape(run(scheduler)) == [("c", 0, 2)]


def decoding_scheduler(**policy) -> tuple[Scheduler, list[float]]:
    """One row that decodes; the clock is a list of one number."""
    now = [100.0]
    scheduler = make_scheduler(clock=lambda: now[0], policy=SchedulePolicy(**policy))
    add(scheduler, "running", prompt_len=2, max_tokens=40)
    run(scheduler)
    return scheduler, now


def test_a_new_request_waits_for_company_within_the_window_while_others_decode():
    scheduler, now = decoding_scheduler(batch_window_s=0.05)
    add(scheduler, "a", prompt_len=2, arrival_s=100.0)
    assert run(scheduler).phase is Phase.DECODE
    now[0] = 100.04
    add(scheduler, "b", prompt_len=2, arrival_s=100.04)
    assert run(scheduler).phase is Phase.DECODE
    now[0] = 100.06
    assert shape(run(scheduler)) == [("a", 0, 2), ("b", 0, 2)]


def test_nobody_is_held_when_nothing_decodes_or_the_promise_is_near_or_the_batch_is_full():
    idle = make_scheduler(clock=lambda: 100.0, policy=SchedulePolicy(batch_window_s=9.0))
    add(idle, "a", prompt_len=2, arrival_s=100.0)
    assert run(idle).phase is Phase.PREFILL
    urgent, now = decoding_scheduler(batch_window_s=9.0, urgent_wait_s=0.5)
    add(urgent, "a", prompt_len=2, arrival_s=100.0)
    assert run(urgent).phase is Phase.DECODE
    now[0] = 100.6
    assert run(urgent).phase is Phase.PREFILL
    full, _ = decoding_scheduler(batch_window_s=9.0, micro_batch_size=2)
    add(full, "a", prompt_len=2, arrival_s=100.0)
    assert run(full).phase is Phase.DECODE
    add(full, "b", prompt_len=2, arrival_s=100.0)
    assert run(full).phase is Phase.PREFILL


def test_like_lengths_go_together_within_the_window_and_the_first_stays_first():
    policy = SchedulePolicy(batch_window_s=1.0, length_multiple=4, micro_batch_size=2)
    scheduler = make_scheduler(clock=lambda: 100.0, policy=policy)
    for name, length, arrival_s in (("a", 3, 99.0), ("long", 12, 99.1), ("b", 4, 99.2), ("late", 3, 100.5)):
        add(scheduler, name, prompt_len=length, arrival_s=arrival_s)
    assert shape(run(scheduler)) == [("a", 0, 3), ("b", 0, 4)]
    assert shape(run(scheduler)) == [("long", 0, 12), ("late", 0, 3)]
