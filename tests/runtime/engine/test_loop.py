"""The engine's thread: requests in, events out, from any thread; nothing is lost and nothing stays allocated."""

import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.config import parse_config
from runtime.engine.build import load_engine
from runtime.engine.commands import Stop
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.loop import EngineLoop
from runtime.engine.steering import Steering
from runtime.engine.tokenizer import ByteTokenizer
from runtime.errors import ContextTooLong, InvalidRequest, QueueFull, Unavailable
from runtime.model.architecture import from_hf_config
from runtime.request import FinishReason, GrammarSpec, Request, SamplingParams, TokenEvent
from runtime.schedule.request_checks import ModelLimits
from runtime.schedule.sequence import Sequence
from tests.engine_driver import TINY
from tests.patience import PATIENCE_S, until

CONFIG = parse_config(
    {
        "model": {"load_format": "dummy", "dtype": "fp32"},
        "kv_cache": {"kv_cache_size": "4MiB", "page_size": 4},
        "ladder": {"decode_rows": [4], "prefill_tokens": [32], "cache_dir": "off"},
        "server": {"max_queued_requests": 64, "max_queued_tokens": 4096},
    }
)


class Inbox:
    """Collects events by request and says when one has ended."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self._changed = threading.Condition()

    def publish(self, events: list[TokenEvent]) -> None:
        with self._changed:
            for event in events:
                self.events[event.request_id].append(event)
            self._changed.notify_all()

    def wait(self, request_id: str, timeout_s: float = PATIENCE_S) -> list[TokenEvent]:
        def is_over() -> bool:
            return bool(self.events[request_id]) and self.events[request_id][-1].finish_reason is not None

        with self._changed:
            assert self._changed.wait_for(is_over, timeout_s), f"{request_id} has not ended"
            return self.events[request_id]


class HoldingInbox(Inbox):
    """Holds up the engine at its first event, in the middle of a request, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def publish(self, events: list[TokenEvent]) -> None:
        super().publish(events)
        self.has_begun.set()
        assert self.may_go_on.wait(PATIENCE_S)


def make_loop(config=CONFIG, load=None) -> EngineLoop:
    tokenizer = ByteTokenizer(vocab_size=264)
    arch = from_hf_config(TINY | {"vocab_size": 264})

    def load_tiny():
        return load_engine(config, Path(), arch, tokenizer.eos_ids, 256)

    grammars = GrammarCompiler(tokenizer, 264)
    return EngineLoop(config, ModelLimits(256, 264), tokenizer, grammars, load or load_tiny)


@pytest.fixture(scope="module")
def loop():
    loop = make_loop()
    with pytest.raises(Unavailable, match="loading"):
        loop.submit([request("early")])
    loop.start()
    loop.wait_complete(120)
    yield loop
    loop.shutdown()
    assert loop.state == "stopped"


@pytest.fixture
def inbox(loop) -> Inbox:
    inbox = Inbox()
    loop.set_publisher(inbox.publish)
    return inbox


def request(name: str, text: str = "once upon a time", **params) -> Request:
    sampling = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params))
    return Request(name, tuple(text.encode()), sampling, arrival_s=time.monotonic())


def settled(loop: EngineLoop):
    """A snapshot taken after everything said so far, once nothing runs or waits."""
    turned = threading.Event()
    loop.call(turned.set)
    assert turned.wait(PATIENCE_S)
    old = loop.snapshot()

    def idle():
        found = loop.snapshot()
        return found if found is not old and found.num_running == found.num_waiting == 0 else None

    return until(idle)


def test_a_request_from_submit_to_end(loop, inbox):
    loop.submit([request("a", logprobs=2)])
    events = inbox.wait("a")
    assert sum(len(e.token_ids) for e in events) == 12
    assert sum(len(e.logprobs) for e in events) == 12
    assert events[-1].finish_reason is FinishReason.LENGTH
    snapshot = settled(loop)
    assert snapshot.used_pages == 0
    assert snapshot.late_compiles == 0
    assert snapshot.ttft_s.count >= 1
    assert sum(r.hits for r in snapshot.rungs) > 0


def test_many_at_once_all_end_and_nothing_stays_allocated(loop, inbox):
    names = [f"many-{i}" for i in range(40)]
    for name in names:
        loop.submit([request(name, text="word " * (1 + len(name) % 7))])
    for name in names:
        assert sum(len(e.token_ids) for e in inbox.wait(name)) == 12
    assert settled(loop).used_pages == 0


def test_aborts_free_everything(loop, inbox):
    names = [f"gone-{i}" for i in range(20)]
    loop.submit([request(n, max_tokens=200) for n in names])
    for name in names:
        loop.abort([name, "unknown"])
    assert settled(loop).used_pages == 0
    loop.submit([request("after")])
    assert inbox.wait("after")[-1].finish_reason is FinishReason.LENGTH
    assert all(inbox.events[n] == [] or inbox.events[n][-1].finish_reason is None for n in names)


def test_what_can_never_run_is_refused_at_once(loop):
    with pytest.raises(ContextTooLong, match="256"):
        loop.submit([request("long", max_tokens=250)])
    with pytest.raises(InvalidRequest, match="no tokens"):
        loop.submit([request("empty", text="")])
    with pytest.raises(InvalidRequest, match="264"):
        loop.submit([Request("ids", (999,), SamplingParams())])
    with pytest.raises(InvalidRequest, match="logit_bias"):
        loop.submit([request("bias", logit_bias=((264, 1.0),))])
    with pytest.raises(InvalidRequest, match="stop token ids"):
        loop.submit([request("stops", stop_token_ids=tuple(range(9)))])


def test_a_full_queue_says_when_to_come_back(loop, inbox):
    def flood() -> None:
        for i in range(200):
            loop.submit([request(f"flood-{i}", max_tokens=200)])

    with pytest.raises(QueueFull) as caught:
        flood()
    assert 1 <= caught.value.retry_after_s <= 60
    loop.abort([f"flood-{i}" for i in range(200)])
    assert settled(loop).used_pages == 0


def test_deadline_in_the_queue(loop, inbox):
    loop.submit([request(f"busy-{i}", max_tokens=200) for i in range(8)])
    late = request("late")
    loop.submit(
        [Request("late", late.prompt_ids, late.params, late.arrival_s, deadline_s=time.monotonic() - 1)]
    )
    event = inbox.wait("late")[-1]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error is not None
    assert event.error.startswith("deadline_exceeded")
    loop.abort([f"busy-{i}" for i in range(8)])
    settled(loop)


def test_grammar_holds_whatever_the_model_wants(loop, inbox):
    spec = GrammarSpec("regex", "(yes|no)[0-9]{3}")
    loop.submit([request("grammar", max_tokens=30, grammar=spec, ignore_eos=False, temperature=1.0, seed=3)])
    loop.submit([request("free", max_tokens=30)])
    events = inbox.wait("grammar")
    text = "".join(e.text for e in events)
    assert text[:-3] in ("yes", "no")
    assert text[-3:].isdigit()
    assert events[-1].finish_reason is FinishReason.STOP
    assert sum(len(e.token_ids) for e in inbox.wait("free")) == 30


def test_bad_grammar_ends_in_an_error_event(loop, inbox):
    loop.submit([request("bad", grammar=GrammarSpec("regex", "(("))])
    event = inbox.wait("bad")[-1]
    assert event.error is not None
    assert event.error.startswith("invalid_value")
    settled(loop)


def test_prompt_scores_come_with_the_first_event(loop, inbox):
    loop.submit([request("score", text="x" * 50, max_tokens=2, prompt_logprobs=1)])
    events = inbox.wait("score")
    assert len(events[0].prompt_logprobs) == 49
    assert sum(len(e.prompt_logprobs) for e in events) == 49


def test_drain_refuses_new_and_finishes_old():
    loop, inbox = make_loop(), Inbox()
    loop.set_publisher(inbox.publish)
    loop.start()
    loop.wait_ready(120)
    loop.submit([request("old", max_tokens=60)])
    loop.begin_drain()
    with pytest.raises(Unavailable, match="draining"):
        loop.submit([request("new")])
    assert inbox.wait("old")[-1].finish_reason is FinishReason.LENGTH
    loop.shutdown()


def test_shutdown_ends_running_requests_with_an_error(monkeypatch):
    loop, inbox = make_loop(), HoldingInbox()
    loop.set_publisher(inbox.publish)
    loop.start()
    loop.wait_ready(120)
    waited = threading.Event()
    monkeypatch.setattr(loop._loaded.engine, "wait_idle", waited.set)
    loop.submit([request("cut", max_tokens=200)])
    assert inbox.has_begun.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        shutdown = pool.submit(loop.shutdown)
        until(lambda: not loop._commands.empty())
        inbox.may_go_on.set()
        assert shutdown.result(PATIENCE_S)
    assert waited.is_set()  # no launch is left to meet those of a next engine
    assert inbox.wait("cut")[-1].finish_reason is FinishReason.ERROR


def test_orders_that_were_given_up_take_nobodys_events_away():
    """They, and a request behind them, come while the engine is busy and then ends."""
    loop, inbox = make_loop(), HoldingInbox()
    loop.set_publisher(inbox.publish)
    loop.start()
    loop.wait_ready(120)
    loop.submit([request("running", max_tokens=200)])
    assert inbox.has_begun.wait(PATIENCE_S)
    assert loop.configure(CONFIG).cancel()  # is passed over, and serving goes on
    loop._commands.put(Stop())
    cut = [loop.configure(CONFIG), loop.configure(CONFIG)]  # behind the end: nobody carries them out
    assert cut[0].cancel()
    loop.submit([request("behind")])
    inbox.may_go_on.set()
    for name in ("running", "behind"):
        assert inbox.wait(name)[-1].finish_reason is FinishReason.ERROR
    assert cut[0].cancelled()
    with pytest.raises(Unavailable, match="stopped"):
        cut[1].result(60)
    assert loop.shutdown()
    assert loop.state == "stopped"


def test_an_idle_engine_does_not_wait_between_the_parts_of_a_plan(loop, monkeypatch):
    """Each of its turns makes a part; at 50 ms a turn a plan of many layers would take seconds."""
    waits: list[float] = []
    take, enough = loop._take_commands, threading.Event()

    def noted(scheduler, wait_s):
        waits.append(wait_s)
        if len(waits) == 50:
            enough.set()
        return take(scheduler, wait_s)

    settled(loop)
    monkeypatch.setattr(Steering, "is_planning", True)
    monkeypatch.setattr(loop, "_take_commands", noted)
    assert enough.wait(30)
    monkeypatch.undo()
    assert set(waits[1:50]) == {0.0}


def test_a_load_that_fails_is_told():
    def broken():
        raise RuntimeError("no such weights")

    loop = make_loop(load=broken)
    loop.start()
    with pytest.raises(Unavailable, match="no such weights"):
        loop.wait_ready(10)
    assert loop.snapshot().state == "failed"
    with pytest.raises(Unavailable):
        loop.submit([request("x")])


def test_the_timeline_of_a_request_and_what_it_says_of_its_promises(loop, inbox):
    before = settled(loop).promises
    loop.submit([request("traced-0", text="xyzzy " * 9)])  # 54 tokens that are in no cache: two chunks
    inbox.wait("traced-0")
    after = settled(loop)
    assert after.promises.num_requests == before.num_requests + 1
    (trace,) = loop.timelines.find(frozenset({"traced"}))
    kinds = [event.kind for event in trace.events]
    assert kinds[:3] == ["prefill", "prefill", "first_token"]
    assert kinds[-1] == "finished"
    assert set(kinds[3:-1]) == {"decode"}
    assert sum(e.tokens for e in trace.events if e.kind == "prefill") == 54
    assert sum(e.tokens for e in trace.events if e.kind == "decode") == 11
    assert trace.first_token_s is not None
    assert trace.finished_s is not None
    assert trace.arrival_s < trace.first_token_s < trace.finished_s
    assert after.phases["decode"].busy_s + after.phases["prefill"].busy_s == pytest.approx(after.busy_s)
    assert sum(rung.busy_s for rung in after.rungs) == pytest.approx(after.busy_s)


def test_a_preemption_reaches_the_timeline_of_its_request():
    class Preempting:
        num_preemptions = 1

        def schedule(self) -> None:
            sequence.num_preemptions = 1

    idle_loop, sequence = make_loop(), Sequence(request("pushed-0"))
    idle_loop.timelines.start(sequence)
    assert idle_loop._schedule(Preempting()) is None
    (trace,) = idle_loop.timelines.find(frozenset({"pushed-0"}))
    assert [event.kind for event in trace.events] == ["preempted"]
    assert trace.num_preemptions == 1
