"""LiveConfig over the fake engine, without HTTP: failing rungs, failing disks, engines that refuse, trials on a fake clock."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane import config_applier
from control_plane.canary import CanarySpec
from control_plane.config_state import open_state
from control_plane.config_store import ConfigStore, RevisionStatus
from control_plane.errors import ChangeLocked, InvalidConfig, NotFound, StaleRevision, StoreFailed
from control_plane.live_config import LiveConfig
from runtime.config import EngineConfig, parse_config
from runtime.engine.stats import ITL_BOUNDS_S, Histogram
from runtime.errors import RuntimeFault, Unavailable
from tests.control_plane.fake_engine import FakeEngine

BY: dict[str, Any] = {"if_match": None, "actor": "ab12", "reason": "test"}
ALPHA = {"batch_processing": {"alpha": 0.25}}
ROWS = {"batch_processing": {"max_batch_size": 64}}
SPEC = CanarySpec(60.0, "itl_p99")


class Setup:
    """A LiveConfig whose clock moves by `pass_time`."""

    def __init__(self, engine: FakeEngine, **sections: Any) -> None:
        self.engine, self.fake = engine, engine.configuration
        self.now_s = 1000.0
        state = open_state(parse_config({"server": {"port": 0}} | sections))
        self.fake.start_with(state.config)
        self.published: list[EngineConfig] = []
        self.live = LiveConfig(
            engine, state, self.published.append, lambda: self.now_s, lambda: 1e9 + self.now_s
        )
        self.itl = engine.histograms.setdefault("itl_s", Histogram(ITL_BOUNDS_S))

    async def pass_time(self, seconds: int, itl_s: float = 0.0, tokens_per_s: int = 10) -> None:
        for _ in range(seconds):
            self.now_s += 1
            if itl_s:
                self.itl.observe(itl_s, tokens_per_s)
            await self.live.tick()

    def events(self) -> list[tuple[str, str]]:
        return [
            (entry["event"], str(entry.get("result"))) for entry in reversed(self.live.audit.page(None, 99))
        ]

    def status(self, number: int) -> RevisionStatus:
        found = self.live.store.get(number)
        assert found is not None
        return found.status


@pytest.fixture
def setup(engine: FakeEngine) -> Iterator[Setup]:
    found = Setup(engine)
    yield found
    assert found.live.audit.verify().is_ok


async def test_a_plan_changes_nothing(setup: Setup) -> None:
    change = await setup.live.plan(ROWS)
    assert [(c.path, c.old, c.new, c.kind) for c in change.fields] == [
        ("batch_processing.max_batch_size", 32, 64, "recompile")
    ]
    assert (change.rungs_to_add, change.rungs_to_drop) == (("decode-64",), ("decode-32",))
    assert (setup.live.revision, setup.fake.taken, setup.events()) == (1, [], [("start", "applied")])


async def test_a_change_is_in_force_stored_published_and_written_down(setup: Setup) -> None:
    revision = await setup.live.change(ALPHA, **BY)
    assert (revision.number, revision.status, revision.overrides) == (2, RevisionStatus.APPLIED, ALPHA)
    assert setup.live.effective.batch_processing.alpha == 0.25
    assert setup.published == [setup.live.effective] == setup.fake.taken
    entry = setup.live.audit.page(None, 1)[0]
    assert (entry["actor"], entry["revision"], entry["reason"]) == ("ab12", 2, "test")
    assert entry["changes"] == [{"path": "batch_processing.alpha", "kind": "live", "old": 0.5, "new": 0.25}]


async def test_what_changes_nothing_makes_no_revision(setup: Setup) -> None:
    assert (await setup.live.change({"batch_processing": {"alpha": 0.5}}, **BY)).number == 1
    assert (await setup.live.change({}, **BY)).number == 1
    assert setup.fake.taken == []


async def test_null_gives_the_default_back(engine: FakeEngine) -> None:
    setup = Setup(engine, batch_processing={"alpha": 0.75})
    await setup.live.change({"batch_processing": {"alpha": None}}, **BY)
    assert setup.live.effective.batch_processing.alpha == 0.5
    await setup.live.change({"batch_processing": None, "slo": {"ttft": "1s"}}, **BY)
    assert setup.live.effective.batch_processing == EngineConfig().batch_processing


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({"batch_processing": {"alpha": 7}}, "patch"),
        (
            {"batch_processing": {"max_batch_size": 65}},
            "batch_processing.max_batch_size",
        ),  # the engine's word
        ({"server": {"admin_keys": ["f" * 64]}}, "server.admin_keys"),
        ({"server": {"host": "0.0.0.0"}}, "server.host"),
        ({"server": None}, "server.port"),
        ({"ladder": {"cache_dir": "/tmp/x"}}, "ladder.cache_dir"),
        ({"model": {"path": "/tmp/x"}}, "model.path"),
        ({"model": {"aliases": ["x" * 100_000]}}, "patch"),
        ({"ladder": {"decode_rows": [1] * 100_000}}, "patch"),
    ],
)
async def test_invalid_changes_leave_everything_as_it_was(setup: Setup, patch: dict, param: str) -> None:
    with pytest.raises(InvalidConfig) as found:
        await setup.live.change(patch, **BY)
    assert found.value.param == param
    assert (setup.live.revision, setup.fake.taken) == (1, [])
    entry = setup.live.audit.page(None, 1)[0]
    assert (entry["event"], entry["result"]) == ("change", "422 invalid_config")
    assert len(str(entry)) < 5000
    assert "f" * 20 not in str(entry)


async def test_a_stale_revision_is_refused(setup: Setup) -> None:
    await setup.live.change(ALPHA, **BY)
    with pytest.raises(StaleRevision) as found:
        await setup.live.change(ROWS, **BY | {"if_match": 1})
    assert found.value.revision == 2
    assert (await setup.live.change(ROWS, **BY | {"if_match": 2})).number == 3


async def test_restart_fields_wait_and_are_shown(setup: Setup) -> None:
    await setup.live.change({"ladder": {"max_prefill_tokens": 256}} | ALPHA, **BY)
    assert setup.live.pending_restart == ("ladder.max_prefill_tokens",)
    assert setup.live.effective.ladder.max_prefill_tokens == 512
    assert setup.live.stored.ladder.max_prefill_tokens == 256
    change = await setup.live.plan({"slo": {"ttft": "1s"}})
    assert [c.path for c in change.fields] == ["slo.ttft"]  # not what waits since before
    await setup.live.change({"ladder": {"max_prefill_tokens": 512}}, **BY)
    assert setup.live.pending_restart == ()


async def test_rollback_is_a_new_revision(setup: Setup) -> None:
    await setup.live.change(ALPHA, **BY)
    await setup.live.change({"slo": {"ttft": "1s"}}, **BY)
    revision = await setup.live.rollback(1, **BY)
    assert (revision.number, revision.rolled_back_to, setup.live.effective) == (4, 1, setup.fake.config)
    assert setup.live.effective == setup.live.stored == parse_config({"server": {"port": 0}})
    with pytest.raises(NotFound):
        await setup.live.rollback(99, **BY)


async def test_new_rungs_compile_while_the_change_is_shown_as_compiling(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    assert (await setup.live.change(ROWS, **BY)).status is RevisionStatus.COMPILING
    await setup.pass_time(2)
    assert setup.status(2) is RevisionStatus.COMPILING
    setup.fake.end_compile()
    await setup.pass_time(1)
    assert setup.status(2) is RevisionStatus.APPLIED
    assert setup.events()[-1] == ("compiled", "applied")


async def test_a_rung_that_fails_takes_its_change_back_and_keeps_later_ones(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS | {"slo": {"ttft": "1s", "itl": "50ms"}}, **BY)
    await setup.live.change({"slo": {"ttft": "3s"}} | {"batch_processing": {"alpha": 0.25}}, **BY)
    setup.fake.end_compile("decode-64: out of memory")
    await setup.pass_time(1)
    assert (setup.status(2), setup.status(3)) == (RevisionStatus.FAILED, RevisionStatus.APPLIED)
    newest = setup.live.newest
    assert (newest.number, newest.actor) == (4, "server")
    assert "decode-64: out of memory" in newest.reason
    config = setup.live.effective
    assert (config.batch_processing.max_batch_size, config.slo.itl) == (32, 0.1)
    assert (config.slo.ttft, config.batch_processing.alpha) == (3.0, 0.25)
    assert config == setup.live.stored == setup.published[-1]
    assert setup.live.store.get(2).error == "decode-64: out of memory"
    await setup.pass_time(2)
    assert setup.live.revision == 4


async def test_a_second_order_before_the_first_is_done(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS, **BY)
    await setup.live.change({"batch_processing": {"max_batch_size": 48}}, **BY)
    setup.fake.end_compile("decode-48: out of memory")
    await setup.pass_time(1)
    assert setup.live.effective.batch_processing.max_batch_size == 32
    assert setup.status(2) is setup.status(3) is RevisionStatus.FAILED


async def test_an_old_failure_is_not_taken_for_a_new_one(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS, **BY)
    setup.fake.end_compile("decode-64: out of memory")
    await setup.pass_time(1)
    await setup.live.change(ALPHA, **BY)
    await setup.pass_time(2)
    assert setup.live.newest.number == 4
    assert setup.status(4) is RevisionStatus.APPLIED


async def test_what_cannot_be_taken_back_is_left_for_the_next_start(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS, **BY)
    setup.fake.refuses = Unavailable("the engine is draining")
    setup.fake.end_compile("decode-64: out of memory")
    await setup.pass_time(2)
    assert setup.status(2) is RevisionStatus.COMPILING  # which a start takes back
    assert (setup.live.revision, setup.live.effective) == (2, setup.fake.config)
    assert setup.events()[-1] == ("revert", "503 server_is_overloaded")


async def test_a_full_disk_changes_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: ConfigStore, revision: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ConfigStore, "append", full)
        with pytest.raises(StoreFailed, match="No space"):
            await setup.live.change(ALPHA, **BY)
    assert (setup.live.revision, setup.fake.taken) == (1, [])
    await setup.live.change(ALPHA, **BY)


@pytest.mark.parametrize("fault", [Unavailable("gone"), InvalidConfig("no"), RuntimeError("bug")])
async def test_an_engine_that_refuses_leaves_no_revision(setup: Setup, fault: Exception) -> None:
    setup.fake.refuses = fault
    with pytest.raises(type(fault)):
        await setup.live.change(ALPHA, **BY)
    assert (setup.live.revision, setup.live.stored) == (1, setup.live.effective)
    setup.fake.refuses = None
    assert (await setup.live.change(ALPHA, **BY)).number == 2


async def test_an_engine_that_hangs_is_given_up(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_applier, "CONFIGURE_TIMEOUT_S", 0.02)
    setup.fake.is_stuck = True
    with pytest.raises(Unavailable):
        await setup.live.change(ALPHA, **BY)
    assert setup.live.revision == 1


async def test_a_caller_that_goes_away_leaves_no_half_change(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_go = threading.Event(), threading.Event()
    append = ConfigStore.append

    def slow(store: ConfigStore, revision: Any) -> None:
        reached.set()
        may_go.wait(60)
        append(store, revision)

    monkeypatch.setattr(ConfigStore, "append", slow)
    task = asyncio.ensure_future(setup.live.change(ALPHA, **BY))
    await asyncio.to_thread(reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go.set()
    await setup.live.change({"slo": {"ttft": "1s"}}, **BY)  # waits for the lock, so for the first to end
    assert (setup.live.revision, setup.live.effective.batch_processing.alpha) == (3, 0.25)


# -- trials --------------------------------------------------------------------------------------------------------


async def test_a_good_trial_is_accepted_with_its_numbers(setup: Setup) -> None:
    await setup.pass_time(90, itl_s=0.05)
    revision = await setup.live.change(ALPHA, **BY, canary=SPEC)
    assert revision.status is RevisionStatus.CANARY
    await setup.pass_time(59, itl_s=0.045)
    assert setup.live.trial is not None
    await setup.pass_time(1, itl_s=0.045)
    assert (setup.live.trial, setup.status(2), setup.live.revision) == (None, RevisionStatus.APPLIED, 2)
    entry = setup.live.audit.page(None, 1)[0]
    assert (entry["event"], entry["result"], entry["actor"]) == ("canary", "accepted", "server")
    assert entry["canary"]["before"]["num_seen"] == entry["canary"]["since"]["num_seen"] == 600
    assert entry["canary"]["worse_percent"] < 20


async def test_a_bad_trial_takes_its_change_back(setup: Setup) -> None:
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ALPHA, **BY, canary=SPEC)
    await setup.pass_time(10, itl_s=0.9)
    assert (setup.status(2), setup.live.revision) == (RevisionStatus.REVERTED, 3)
    assert setup.live.effective.batch_processing.alpha == 0.5
    assert setup.published[-1] == setup.live.effective
    assert "itl_p99" in setup.live.newest.reason
    canary = setup.live.store.get(2).canary
    assert canary is not None
    assert canary["outcome"] == "reverted"
    assert setup.live.counts["canary_reverted"] == 1
    assert ("revert", "applied") in setup.events()


async def test_a_trial_that_nobody_used_is_extended_once_then_taken_back(setup: Setup) -> None:
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ALPHA, **BY, canary=SPEC)
    await setup.pass_time(60)
    assert setup.live.trial is not None
    assert setup.live.trial.is_extended
    await setup.pass_time(60)
    assert (setup.live.trial, setup.status(2)) == (None, RevisionStatus.REVERTED)
    assert "nobody could tell" in setup.live.newest.reason


@pytest.mark.parametrize(
    ("patch", "seconds", "word"),
    [
        (ALPHA, 2, "min_requests"),
        ({}, 90, "changes nothing"),
        (ALPHA | {"ladder": {"max_prefill_tokens": 256}}, 90, "restart"),
    ],
)
async def test_a_trial_that_could_tell_nothing_is_refused(
    setup: Setup, patch: dict, seconds: int, word: str
) -> None:
    await setup.pass_time(seconds, itl_s=0.05)
    with pytest.raises(InvalidConfig, match=word):
        await setup.live.plan(patch, SPEC)
    with pytest.raises(InvalidConfig, match=word):
        await setup.live.change(patch, **BY, canary=SPEC)
    assert (setup.live.revision, setup.live.trial) == (1, None)


async def test_nobody_else_may_change_anything_meanwhile(setup: Setup) -> None:
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ALPHA, **BY, canary=SPEC)
    with pytest.raises(ChangeLocked) as found:
        await setup.live.change({"slo": {"ttft": "1s"}}, **BY)
    assert found.value.status == 423
    with pytest.raises(ChangeLocked):
        await setup.live.rollback(1, **BY)
    by = {"actor": "ab12", "reason": "looks fine"}
    assert (await setup.live.accept_canary(**by)).status is RevisionStatus.APPLIED
    with pytest.raises(NotFound):
        await setup.live.revert_canary(**by)
    assert (await setup.live.change({"slo": {"ttft": "1s"}}, **BY)).number == 3


async def test_a_trial_is_taken_back_by_hand(setup: Setup) -> None:
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ALPHA, **BY, canary=SPEC)
    revision = await setup.live.revert_canary(actor="cd34", reason="")
    assert (revision.number, revision.actor) == (3, "cd34")
    assert "by hand" in revision.reason
    assert setup.live.effective.batch_processing.alpha == 0.5


async def test_the_guard_period_starts_when_the_rungs_serve(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ROWS, **BY, canary=SPEC)
    await setup.pass_time(100, itl_s=0.9)  # slow because it compiles: not the change's fault
    setup.fake.end_compile()
    await setup.pass_time(1)
    assert setup.status(2) is RevisionStatus.CANARY
    await setup.pass_time(61, itl_s=0.05)
    assert setup.status(2) is RevisionStatus.APPLIED


async def test_a_trial_ends_when_its_rungs_fail(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ROWS, **BY, canary=SPEC)
    setup.fake.end_compile("decode-64: out of memory")
    await setup.pass_time(1)
    assert (setup.live.trial, setup.status(2)) == (None, RevisionStatus.FAILED)
    assert setup.live.effective.batch_processing.max_batch_size == 32


async def test_faults_are_of_the_family_that_http_answers() -> None:
    assert all(
        issubclass(kind, RuntimeFault) for kind in (InvalidConfig, StaleRevision, ChangeLocked, StoreFailed)
    )
