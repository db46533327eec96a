"""One ladder replaces another while the old one serves, on the real engine."""

import pytest

from runtime.engine.change import LadderState
from runtime.engine.ladder_swap import LadderSwap
from runtime.ladder.bucket import decode_bucket
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.late_compiles import monitor
from runtime.request import Request, SamplingParams
from tests.engine_driver import EngineDriver


@pytest.fixture(scope="module")
def driver() -> EngineDriver:
    return EngineDriver()


def ladder_of(driver: EngineDriver, *rows: int) -> BucketLadder:
    return BucketLadder(driver.engine.ladder.prefill, tuple(decode_bucket(n) for n in rows))


def finish(swap: LadderSwap, driver: EngineDriver) -> list[str]:
    """Turns until the change has ended; names of the ladders' decode rungs that were seen on the way."""
    seen = []
    while swap.last.state is LadderState.COMPILING:
        seen.append(driver.engine.ladder.decode[-1].name)
        swap.turn()
    return seen


def generate(driver: EngineDriver) -> list[list[int]]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    return driver.run(Request(f"r{i}", (5, 6, 7 + i), params) for i in range(3))


def test_the_old_ladder_serves_until_the_new_one_is_ready(driver):
    swap = LadderSwap(driver.engine)
    before = generate(driver)
    change = swap.order(ladder_of(driver, 2, 4))
    assert (change.number, change.state) == (1, LadderState.COMPILING)
    assert (change.rungs_to_add, change.rungs_to_drop) == (("decode-2",), ("decode-1",))
    assert generate(driver) == before  # while it compiles, or just after
    finish(swap, driver)
    assert [b.rows for b in driver.engine.ladder.decode] == [2, 4]
    assert swap.last.state is LadderState.STEADY
    assert swap.last.seconds > 0
    monitor.arm()
    try:
        late = monitor.num_late
        assert generate(driver) == before
        assert monitor.num_late == late
    finally:
        monitor.disarm()


def test_the_ladder_before_comes_back_without_a_compile_and_older_ones_are_freed(driver):
    engine, swap = driver.engine, LadderSwap(driver.engine)
    swap.order(ladder_of(driver, 1, 4))
    finish(swap, driver)
    swap.order(ladder_of(driver, 3, 4))
    finish(swap, driver)
    assert swap.order(ladder_of(driver, 1, 4)).state is LadderState.STEADY  # at once
    assert generate(driver)
    swap.order(ladder_of(driver, 4))
    swap.order(ladder_of(driver, 2, 4))
    finish(swap, driver)
    assert {s.name for s in engine.compiler.steps if "decode" in s.name} == {"decode-2", "decode-4"}


def test_nothing_to_do_is_no_change(driver):
    swap = LadderSwap(driver.engine)
    assert swap.order(driver.engine.ladder).number == 0


def test_dropping_alone_is_done_at_once(driver):
    swap = LadderSwap(driver.engine)
    assert swap.order(ladder_of(driver, 4)).state is LadderState.STEADY
    assert [b.rows for b in driver.engine.ladder.decode] == [4]


def test_a_rung_that_fails_leaves_the_old_ladder_and_is_named(driver, monkeypatch):
    compiler, swap = driver.engine.compiler, LadderSwap(driver.engine)
    lower = compiler._lower_rung
    before = driver.engine.ladder

    def refuse(bucket):
        if bucket.rows == 3:
            raise MemoryError("no room for three")
        return lower(bucket)

    monkeypatch.setattr(compiler, "_lower_rung", refuse)
    swap.order(ladder_of(driver, 2, 3, 4))
    finish(swap, driver)
    assert swap.last.state is LadderState.FAILED
    assert "rung decode-3 failed to compile: MemoryError: no room for three" in swap.last.error
    assert driver.engine.ladder == before
    assert generate(driver)
    monkeypatch.undo()
    swap.order(ladder_of(driver, 3, 4))  # what failed is tried again
    finish(swap, driver)
    assert swap.last.state is LadderState.STEADY
    assert [b.rows for b in driver.engine.ladder.decode] == [3, 4]


def test_a_rung_that_fails_to_run_leaves_the_old_ladder(driver, monkeypatch):
    swap, before = LadderSwap(driver.engine), driver.engine.ladder

    def refuse(bucket):
        raise RuntimeError("out of scratch memory")

    monkeypatch.setattr(driver.engine, "warm_up", refuse)
    swap.order(ladder_of(driver, 2, 4))
    finish(swap, driver)
    assert "rung decode-2 failed to run: RuntimeError: out of scratch memory" in swap.last.error
    assert driver.engine.ladder == before


def test_a_new_order_replaces_one_that_compiles(driver):
    swap, before = LadderSwap(driver.engine), driver.engine.ladder
    swap.order(ladder_of(driver, 2, 3, 4))
    assert swap.order(before).state is LadderState.STEADY  # back again
    assert driver.engine.ladder == before
    swap.order(ladder_of(driver, 1, 2, 4))
    swap.order(ladder_of(driver, 1, 4))
    finish(swap, driver)
    assert [b.rows for b in driver.engine.ladder.decode] == [1, 4]
    assert generate(driver)


def test_only_one_decode_rung_may_be_used(driver):
    driver.engine.restrict_decode(4)
    driver.steps.clear()
    generate(driver)
    assert {step.bucket.name for step, _ in driver.steps if step.bucket.phase == "decode"} == {"decode-4"}
    with pytest.raises(ValueError, match="no decode rung has 5 rows"):
        driver.engine.restrict_decode(5)
    driver.engine.restrict_decode(None)
