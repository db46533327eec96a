"""Live changes on the running engine: each is seen in what the engine does, and no request notices."""

import threading
import time
from itertools import pairwise

import pytest

from runtime.adaptive.decision import Decision
from runtime.config import EngineConfig, parse_config
from runtime.engine.change import Applied, LadderState
from runtime.engine.loop import EngineLoop
from runtime.errors import InvalidRequest, QueueFull, Unavailable
from runtime.ladder.late_compiles import monitor
from tests.patience import until
from tests.runtime.engine.test_loop import Inbox, make_loop, request, settled

SECTIONS = {
    "model": {"load_format": "dummy", "dtype": "fp32"},
    "kv_cache": {"kv_cache_size": "4MiB", "page_size": 4},
    "ladder": {"decode_rows": [1, 4], "prefill_tokens": [32], "cache_dir": "off", "row_slots": 6},
    "batch_processing": {
        "max_batch_size": 4,
        "base_batch_size": 4,
        "dynamic_adjust_window": "20ms",
        "dynamic_batch_window": "10ms",
    },
    # However slow the machine: no look at the engine is stale, no step is above the promise.
    "controller": {"dwell": "10ms", "stale_after": "60s"},
    "slo": {"itl": "10s"},
}


def config(**changes) -> EngineConfig:
    """SECTIONS with dotted fields changed."""
    data = {name: dict(fields) for name, fields in SECTIONS.items()}
    for path, value in changes.items():
        section, name = path.split("__")
        data.setdefault(section, {})[name] = value
    return parse_config(data)


@pytest.fixture(scope="module")
def running():
    loop = make_loop(config())
    loop.start()
    loop.wait_complete(120)
    yield loop
    loop.shutdown()


@pytest.fixture
def loop(running) -> EngineLoop:
    configure(running)
    return running


@pytest.fixture
def inbox(loop) -> Inbox:
    inbox = Inbox()
    loop.set_publisher(inbox.publish)
    return inbox


def configure(loop: EngineLoop, **changes) -> Applied:
    """Apply and wait for the ladder too."""
    applied = loop.configure(config(**changes)).result(60)
    while loop.snapshot().ladder_change.state is LadderState.COMPILING:
        time.sleep(0.01)
    return applied


def decode_hits(loop: EngineLoop) -> dict[str, int]:
    return {r.name: r.hits for r in settled(loop).rungs if r.phase == "decode"}


def crowd(loop: EngineLoop, inbox: Inbox, name: str, num: int = 8, **params) -> None:
    """Many requests at once, to their end."""
    names = [f"{name}-{i}" for i in range(num)]
    loop.submit([request(n, **params) for n in names])
    for n in names:
        assert inbox.wait(n)[-1].error is None


def test_a_change_holds_from_the_next_step_and_back_in_a_moment(loop, inbox):
    applied = configure(loop, ladder__max_decode_steps=2)
    assert applied.took_s < 5
    assert loop.config.ladder.max_decode_steps == 2
    back = configure(loop)
    assert back.took_s < 5
    assert loop.config == config()


def test_max_batch_size_bounds_what_runs_at_once(loop, inbox):
    configure(loop, batch_processing__max_batch_size=1, ladder__decode_rows=[1])
    before = decode_hits(loop)
    crowd(loop, inbox, "narrow")
    after = decode_hits(loop)
    assert after["decode-1"] > before["decode-1"]
    assert after.keys() == {"decode-1"}


def test_a_larger_ceiling_adds_its_rungs_while_the_old_ladder_serves(loop, inbox):
    monitor.arm()
    late = monitor.num_late
    stop = threading.Event()

    def keep_busy() -> None:
        i = 0
        while not stop.is_set():
            crowd(loop, inbox, f"busy-{i}", num=6)
            i += 1

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        change = configure(
            loop,
            batch_processing__max_batch_size=6,
            batch_processing__base_batch_size=6,
            ladder__decode_rows=[1, 5, 6],
        ).ladder
        assert change.rungs_to_add == ("decode-5", "decode-6")
        assert change.rungs_to_drop == ("decode-4",)
        before = loop.snapshot().num_steps
        while loop.snapshot().num_steps < before + 50:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join(60)
    assert loop.snapshot().ladder_change.state is LadderState.STEADY
    hits = decode_hits(loop)
    assert hits["decode-5"] + hits["decode-6"] > 0
    assert monitor.num_late == late
    monitor.disarm()


def test_what_does_not_fit_changes_nothing(loop):
    with pytest.raises(InvalidRequest, match="not without a restart"):
        loop.configure(config(ladder__row_slots=16, batch_processing__max_batch_size=16))
    with pytest.raises(InvalidRequest, match="room for 512 until"):
        loop.plan(config(ladder__prefill_tokens=[32, 1024]))
    assert loop.config == config()


def test_a_plan_changes_nothing(loop):
    change = loop.plan(config(ladder__decode_rows=[2, 4], slo__itl="5ms"))
    assert change.rungs_to_add == ("decode-2",)
    assert change.compile_s > 0
    assert loop.config == config()
    assert loop.snapshot().ladder_change.state is LadderState.STEADY


def test_restart_fields_are_left_alone(loop):
    configure(loop, server__port=4711)
    assert loop.config.server.port == 8000


def test_the_queue_limit_is_live(loop, inbox):
    configure(loop, server__max_queued_requests=1)
    goes_on = threading.Event()
    loop.call(lambda: goes_on.wait(60))  # nothing leaves the line meanwhile
    loop.submit([request("line-0", max_tokens=2)])
    with pytest.raises(QueueFull, match="1 requests of 1"):
        loop.submit([request("line-1", max_tokens=2)])
    goes_on.set()
    configure(loop)
    loop.submit([request("line-2", max_tokens=2)])
    inbox.wait("line-2")
    settled(loop)


def test_the_prefix_cache_is_live(loop, inbox):
    text = "a prompt that fills several pages of four tokens"

    def cached(name: str) -> int:
        loop.submit([request(name, text=text)])
        return inbox.wait(name)[0].num_cached_tokens

    cached("first")
    assert cached("again") > 0
    configure(loop, kv_cache__enable_prefix_cache=False)
    assert cached("off") == 0


def test_max_decode_steps_bounds_the_tokens_of_one_event(loop, inbox):
    configure(loop, ladder__max_decode_steps=1, slo__itl="100s")
    loop.submit([request("one")])
    assert max(len(e.token_ids) for e in inbox.wait("one")) == 1
    configure(loop, ladder__max_decode_steps=6, slo__itl="100s")
    loop.submit([request("six")])
    assert max(len(e.token_ids) for e in inbox.wait("six")) == 6


def test_the_itl_target_bounds_the_burst(loop, inbox):
    configure(loop, ladder__max_decode_steps=6, slo__itl="1us")
    loop.submit([request("strict")])
    assert max(len(e.token_ids) for e in inbox.wait("strict")) == 1


def test_micro_batch_size_bounds_the_requests_of_a_prefill(loop, inbox):
    fixed = {"batch_processing__enable_dynamic_batch": False}

    def prefills() -> int:
        before = sum(r.hits for r in settled(loop).rungs if r.phase == "prefill")
        crowd(loop, inbox, f"micro-{before}", num=4, text="ab")
        return sum(r.hits for r in settled(loop).rungs if r.phase == "prefill") - before

    configure(loop, **fixed, batch_processing__micro_batch_size=1)
    assert prefills() == 4
    configure(loop, **fixed, batch_processing__micro_batch_size=4)
    assert prefills() < 4


def decided(loop: EngineLoop, controller: str) -> Decision:
    """The controller's first decision by a look at the engine after everything decided so far."""
    last = num_decisions(loop)
    return until(lambda: decisions_after(loop, last, controller))[0]


def num_decisions(loop: EngineLoop) -> int:
    return sum(loop.decision_counts().values())


def decisions_after(loop: EngineLoop, number: int, controller: str) -> list[Decision]:
    """The controller's own, not those that a change of its configuration made."""
    found = loop.decisions(number, 10_000)
    return [d for d in found if d.controller == controller and d.reason != "config"]


OFF = {"batch_processing__enable_dynamic_batch": False}


@pytest.mark.parametrize(
    ("changes", "controller", "seen"),
    [
        (OFF, "batch_size", lambda d: (d.reason, d.value) == ("fixed", 4)),
        (OFF | {"batch_processing__base_batch_size": 2}, "batch_size", lambda d: d.value == 2),
        (
            {"batch_processing__alpha": 0.25},
            "batch_size",
            lambda d: d.inputs["factor"] == pytest.approx(1.25, abs=0.01),
        ),
        (
            {"batch_processing__expert_load_threshold": 0.5},
            "batch_size",
            lambda d: (d.inputs["low"], d.inputs["high"]) == (0.45, 0.5),
        ),
        ({"batch_processing__smoothing": False}, "batch_size", lambda d: d.inputs["low"] == d.inputs["high"]),
        ({"controller__up_below": 0.5}, "batch_size", lambda d: d.inputs["low"] == 0.375),
        ({"controller__down_above": 1.2}, "batch_size", lambda d: d.inputs["high"] == pytest.approx(0.9)),
        (
            {"controller__form": "published", "batch_processing__base_batch_size": 1},
            "batch_size",
            lambda d: d.value == 1,  # 1.5 rounds down to the rung of 1
        ),
        (OFF | {"batch_processing__micro_batch_size": 3}, "micro_batch", lambda d: d.value == 3),
        ({"batch_processing__max_micro_batch_size": 2}, "micro_batch", lambda d: d.value == 2),
        ({"slo__ttft": "4s"}, "interleave", lambda d: d.inputs["urgent_wait_s"] == 2.0),
        ({"controller__ttft_slack": 0.25}, "interleave", lambda d: d.inputs["urgent_wait_s"] == 0.5),
        ({"slo__itl": "3s"}, "interleave", lambda d: d.inputs["itl_s"] == 3.0),
        ({"controller__like_lengths": False}, "interleave", lambda d: d.inputs["length_multiple"] == 0),
        ({"controller__length_multiple": 32}, "interleave", lambda d: d.inputs["length_multiple"] == 32),
        ({"controller__stale_after": "1us"}, "interleave", lambda d: d.reason == "missing_data"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_policy_field_changes_what_is_decided(loop, inbox, changes, controller, seen):
    if controller == "interleave":
        crowd(loop, inbox, "measured", num=2, max_tokens=2)
    before = decided(loop, controller)
    configure(loop, **changes)
    after = decided(loop, controller)
    assert not seen(before), before
    assert seen(after), after


@pytest.mark.parametrize("field", ["dynamic_adjust_window", "dynamic_batch_window"])
def test_windows_set_the_pace_of_decisions(loop, field):
    controller = "batch_size" if field == "dynamic_adjust_window" else "micro_batch"

    def gaps() -> list[float]:
        times = [d.time_s for d in decisions_after(loop, start, controller)]
        return [b - a for a, b in pairwise(times)]

    configure(loop, **{f"batch_processing__{field}": "100ms"})
    start = num_decisions(loop)
    until(lambda: len(gaps()) >= 4)
    assert min(gaps()) >= 0.0999
    configure(loop, **{f"batch_processing__{field}": "1ms"})
    start = num_decisions(loop)
    until(lambda: gaps() and min(gaps()) < 0.0999)  # an idle loop turns every 50 ms


def test_the_decided_size_is_what_the_scheduler_goes_by(loop, inbox):
    configure(loop, **OFF, batch_processing__base_batch_size=1)
    assert loop.snapshot().policy.batch_size == 1
    before = decode_hits(loop)
    crowd(loop, inbox, "alone", num=4)
    after = decode_hits(loop)
    assert after["decode-4"] == before["decode-4"]
    assert after["decode-1"] > before["decode-1"]


def test_the_expected_length_is_a_quantile_of_late(loop, inbox):
    crowd(loop, inbox, "short", num=4, text="ab", max_tokens=2)
    crowd(loop, inbox, "long", num=4, text="ab", max_tokens=100)
    low, high = (
        (configure(loop, controller__expected_len_quantile=q), decided(loop, "micro_batch"))[1].inputs[
            "expected_len"
        ]
        for q in (0.01, 0.99)
    )
    assert low < high


def test_not_before_the_engine_is_ready():
    loop = make_loop(config())
    with pytest.raises(Unavailable, match="loading"):
        loop.configure(config())


def test_what_is_ordered_when_the_engine_ends_is_refused():
    loop = make_loop(config())
    loop.start()
    loop.wait_ready(120)
    loop.shutdown()
    with pytest.raises(Unavailable, match="stopped"):
        loop.configure(config())


def test_rungs_of_two_forms_are_judged_in_traffic_unless_that_is_switched_off(loop, inbox):
    """One device has none: the widest decode rung is given itself as its second form. Times are real, so noise decides."""
    engine = loop._loaded.engine
    rung = engine.ladder.decode[-1]

    def num_verdicts() -> int:
        """By the counts: the log itself forgets what is older than its last thousands of looks."""
        settled(loop)
        return sum(n for (controller, _), n in loop.decision_counts().items() if controller == "step_form")

    loop.call(lambda: engine.forms.measure(rung, rung, engine.warm_up))
    try:
        before = num_verdicts()
        configure(loop, ladder__max_decode_steps=1, parallel__judge_overlap_in_traffic=False)
        crowd(loop, inbox, "unjudged", max_tokens=200)
        assert num_verdicts() == before
        assert engine.forms.choices[rung.name].source == "warm-up"
        configure(loop, ladder__max_decode_steps=1)
        crowd(loop, inbox, "judged", max_tokens=200)
        assert num_verdicts() == before + 1
        choice = engine.forms.choices[rung.name]
        assert (choice.source, choice.trigger) == ("traffic", "first")
        assert ("step_form", choice.reason) in loop.decision_counts()
        assert choice.whole_s > 0
        assert choice.halves_s > 0
    finally:
        loop.call(lambda: engine.forms.keep(()))
