"""Whole or in halves: each rung serves in the form that was faster when it was warmed up, through changes of the ladder.

The engine's own choice with time of ours: a compile in both forms would cost most of a minute.
"""

import pytest

from runtime.engine import engine as engine_module
from runtime.engine.engine import Engine
from runtime.ladder.bucket import Bucket, decode_bucket


class Rungs:
    """Stands for the compiler: every rung has a second form."""

    def in_halves(self, bucket: Bucket) -> Bucket | None:
        return bucket.in_halves(num_shards=2, page_size=4)


class ClockedEngine(Engine):
    """A warm-up takes a second, or `halves_s` in halves; what is measured as whole must be whole."""

    def __init__(self) -> None:
        self.now, self.halves_s, self._has_launched, self.forces_halves = 0.0, 1.0, True, False
        self._forms, self.overlap, self._warm, self.compiler = {}, {}, set(), Rungs()  # type: ignore[assignment]

    def warm_up(self, bucket: Bucket) -> None:
        form = self._forms.get(bucket, bucket)
        self.now += self.halves_s if form.num_halves == 2 else 1.0

    def _do(self, command: object) -> None:
        """Frees executables; there are none."""


@pytest.fixture
def engine(monkeypatch) -> ClockedEngine:
    engine = ClockedEngine()
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: engine.now)
    return engine


FOUR, EIGHT = decode_bucket(4), decode_bucket(8)


def test_each_rung_is_judged_by_its_own_measurement(engine) -> None:
    for rung, halves_s in ((FOUR, 0.99), (EIGHT, 0.5)):
        engine.halves_s = halves_s
        engine.adopt(rung)
    assert engine._forms == {EIGHT: engine.compiler.in_halves(EIGHT)}  # 1 % is not enough
    assert [(c.rung, c.whole_s, c.is_in_halves) for c in engine.overlap.values()] == [
        (FOUR.name, 1.0, False),
        (EIGHT.name, 1.0, True),
    ]
    assert engine.overlap[EIGHT.name].halves_s == pytest.approx(0.5)


def test_a_rung_that_comes_back_is_measured_anew(engine) -> None:
    engine.halves_s = 0.5
    engine.adopt(EIGHT)
    engine.adopt(FOUR)
    engine.keep_rungs((FOUR,))
    assert list(engine.overlap) == [FOUR.name]
    engine.halves_s = 2.0
    engine.adopt(EIGHT)
    choice = engine.overlap[EIGHT.name]
    assert (choice.whole_s, choice.halves_s, choice.is_in_halves) == (1.0, 2.0, False)
    assert EIGHT not in engine._forms


def test_on_means_halves_whatever_they_cost(engine) -> None:
    engine.forces_halves, engine.halves_s = True, 3.0
    engine.adopt(EIGHT)
    assert engine.overlap[EIGHT.name].is_in_halves
