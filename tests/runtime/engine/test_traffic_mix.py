"""The mix of traffic: every token counts once, and the next window is made of what runs and waits."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.traffic_mix import MAX_KEYS, NO_KEY, TrafficMix
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepPlan, StepResult
from runtime.schedule.sequence import Sequence


def sequence(key: str, num_prompt: int = 8, max_tokens: int = 100, row: int | None = None) -> Sequence:
    request = Request(key, tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens), traffic_key=key)
    made = Sequence(request, row=row)
    if row is not None:
        made.prefill_end = made.num_scheduled = num_prompt
    return made


def launch(phase: Phase, tokens: list[tuple[str, int]], num_steps: int = 1) -> tuple[StepPlan, StepResult]:
    chunks = tuple(
        ScheduledChunk(sequence(key), 0, 0, number, (), samples=True, is_new_row=False)
        for key, number in tokens
    )
    read = tuple((7,) * number for _, number in tokens)
    return StepPlan(phase, chunks, num_steps), StepResult(read)


def test_what_runs_decodes_on_and_what_waits_is_prefilled() -> None:
    running, half, waiting = (
        sequence("chat", row=0),
        sequence("code", 40, row=1),
        sequence("summary", 50),
    )
    half.num_scheduled = 30
    mix = TrafficMix(lambda: (running, half, waiting))
    mix.on_step(*launch(Phase.PREFILL, [("chat", 8), ("code", 30)]), 1)
    mix.on_step(*launch(Phase.DECODE, [("chat", 5)], num_steps=6), 6)
    seen, coming = mix.end_window()
    assert seen == {"chat": 13, "code": 30}
    # 38 prompt tokens fit into the next window: 10 that are left of "code", then 28 of "summary".
    assert coming == {"chat": 6, "code": 10, "summary": 28}


def test_a_short_line_is_filled_up_by_requests_like_those_of_before() -> None:
    mix = TrafficMix(lambda: (sequence("new", 10),))
    mix.on_step(*launch(Phase.PREFILL, [("a", 30), ("b", 10)]), 1)
    _, coming = mix.end_window()
    assert coming == {"new": 10, "a": 22.5, "b": 7.5}


def test_prompts_that_wait_count_without_what_the_cache_is_likely_to_hold() -> None:
    """Three quarters of this key's prompts were cached of late; the others were not, or never came."""
    line = sequence("chat", 80), sequence("new", 30)
    mix = TrafficMix(lambda: line)
    for key, start in (("chat", 30), ("code", 0)):
        admitted = sequence(key, 40, row=0)
        chunk = ScheduledChunk(admitted, 0, start, 40 - start, (), samples=True, is_new_row=True)
        mix.on_step(StepPlan(Phase.PREFILL, (chunk,), 1), StepResult(((7,),)), 1)
    assert mix.end_window() == ({"chat": 10, "code": 40}, {"chat": 20, "new": 30})
    mix.on_step(*launch(Phase.PREFILL, [("new", 25)]), 1)
    assert mix.end_window()[1] == {"chat": 20, "new": 5}  # remembered for some windows
    for _ in range(8):
        mix.end_window()
    assert not mix._admitted
    assert not mix._cached


def test_a_request_near_its_end_decodes_no_further() -> None:
    mix = TrafficMix(lambda: (sequence("a", max_tokens=2, row=0),))
    mix.on_step(*launch(Phase.DECODE, [("a", 9)], num_steps=9), 9)
    assert mix.end_window()[1] == {"a": 2}


def test_windows_begin_anew_and_without_keys_nothing_is_said() -> None:
    mix = TrafficMix(lambda: (sequence(NO_KEY, row=0),))
    assert mix.end_window() == (None, None)
    mix.on_step(*launch(Phase.PREFILL, [("a", 3)]), 1)
    assert mix.end_window() == ({"a": 3.0}, {"a": 3.0})
    mix.on_step(*launch(Phase.PREFILL, [(NO_KEY, 4)]), 1)
    assert mix.end_window() == (None, None)


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), max_size=3 * MAX_KEYS))
def test_no_token_is_lost_however_many_keys(tokens: dict[str, int]) -> None:
    mix = TrafficMix(lambda: ())
    mix.on_step(*launch(Phase.PREFILL, list(tokens.items())), 1)
    seen, coming = mix.end_window()
    if seen is None:
        assert tokens.keys() <= {NO_KEY}
        return
    assert len(seen) <= MAX_KEYS
    assert sum(seen.values()) == sum(tokens.values())
    assert coming is not None
    assert abs(sum(coming.values()) - sum(tokens.values())) < 1e-6
