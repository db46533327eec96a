"""A request's timeline: what happened in order, bounded, and nothing at all when it is switched off."""

from runtime.engine.timelines import MAX_EVENTS, EventKind, Timelines
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan
from runtime.schedule.sequence import Sequence, SequenceStatus


def sequence(name: str = "cmpl-1-0") -> Sequence:
    return Sequence(Request(name, (1, 2, 3), SamplingParams(max_tokens=1000), arrival_s=10.0))


def plan(phase: Phase, *sequences: Sequence, num_tokens: int = 1) -> StepPlan:
    return StepPlan(phase, tuple(ScheduledChunk(s, 0, 0, num_tokens, (), True, False) for s in sequences))


def only(timelines: Timelines, name: str = "cmpl-1-0"):
    (found,) = timelines.find(frozenset({name}))
    return found


def test_a_request_from_the_line_to_its_end():
    timelines, s = Timelines(), sequence()
    timelines.start(s)
    assert only(timelines).state == "waiting"
    s.status, s.first_scheduled_s = SequenceStatus.RUNNING, 10.5
    timelines.on_step(plan(Phase.PREFILL, s, num_tokens=2), "prefill-16", 10.5, 10.6, ((),))
    timelines.on_step(plan(Phase.PREFILL, s, num_tokens=1), "prefill-16", 10.6, 10.7, ((9,),))
    timelines.on_step(plan(Phase.DECODE, s), "decode-4", 10.7, 10.8, ((9, 9),))
    timelines.on_step(plan(Phase.DECODE, s), "decode-4", 10.8, 11.0, ((9,),))
    timelines.on_step(plan(Phase.DECODE, s), "decode-8", 11.0, 11.1, ((9,),))
    s.output_ids += [9] * 5
    timelines.finish(s, "length", 11.1)
    trace = only(timelines)
    kinds = [(e.kind, e.rung, e.tokens, e.launches) for e in trace.events]
    assert kinds == [
        (EventKind.PREFILL, "prefill-16", 2, 1),
        (EventKind.PREFILL, "prefill-16", 1, 1),
        (EventKind.FIRST_TOKEN, "", 0, 0),
        (EventKind.DECODE, "decode-4", 3, 2),
        (EventKind.DECODE, "decode-8", 1, 1),
        (EventKind.FINISHED, "", 0, 0),
    ]
    assert abs(trace.events[3].duration_s - 0.3) < 1e-9
    assert trace.rungs == {"prefill-16": 2, "decode-4": 2, "decode-8": 1}
    assert (trace.state, trace.finish_reason, trace.num_generated) == ("finished", "length", 5)
    assert (trace.first_scheduled_s, trace.first_token_s, trace.finished_s) == (10.5, 10.7, 11.1)


def test_a_preemption_is_told_of_the_one_that_was_preempted():
    timelines, a, b = Timelines(), sequence("a-0"), sequence("b-0")
    timelines.start(a)
    timelines.start(b)
    b.num_preemptions = 1
    timelines.on_preemptions(1, 12.0)
    timelines.on_preemptions(1, 13.0)
    assert only(timelines, "a-0").events == ()
    assert [(e.kind, e.time_s) for e in only(timelines, "b-0").events] == [(EventKind.PREEMPTED, 12.0)]


def test_everything_is_bounded_and_the_end_is_kept():
    timelines = Timelines(kept=3)
    sequences = [sequence(f"c-{i}") for i in range(5)]
    for s in sequences:
        timelines.start(s)
    assert [t.request_id for t in timelines.newest(10)] == ["c-4", "c-3", "c-2"]
    timelines.on_step(
        plan(Phase.DECODE, sequences[0]), "decode-1", 1.0, 1.1, ((7,),)
    )  # forgotten: no trouble
    for i in range(MAX_EVENTS * 2):
        timelines.on_step(plan(Phase.DECODE, sequences[4]), f"decode-{i % 2}", i, i + 1, ((7,),))
    timelines.finish(sequences[4], "abort", 999.0)
    trace = only(timelines, "c-4")
    assert len(trace.events) == MAX_EVENTS
    assert trace.num_dropped > 0
    assert trace.events[-1].kind is EventKind.FINISHED
    assert sum(trace.rungs.values()) == 2 * MAX_EVENTS


def test_a_call_finds_all_its_requests_and_no_other():
    timelines = Timelines()
    for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-ab-0", "cmpl-a"):
        timelines.start(sequence(name))
    found = timelines.find(frozenset({"cmpl-a"}))
    assert [t.request_id for t in found] == ["cmpl-a-0", "cmpl-a-1", "cmpl-a"]


def test_off_keeps_nothing_and_on_again_starts_afresh():
    timelines, s = Timelines(), sequence()
    timelines.start(s)
    timelines.switch(False)
    timelines.start(sequence("later-0"))
    timelines.on_step(plan(Phase.DECODE, s), "decode-1", 1.0, 1.1, ((7,),))
    timelines.finish(s, "length", 2.0)
    assert timelines.newest(10) == []
    timelines.switch(True)
    timelines.on_step(plan(Phase.DECODE, s), "decode-1", 2.0, 2.1, ((7,),))
    assert timelines.newest(10) == []


def test_a_finished_request_does_not_keep_its_tokens():
    timelines, s = Timelines(), sequence()
    timelines.start(s)
    timelines.finish(s, "stop", 11.0)
    assert timelines._all[s.request_id].sequence is None
