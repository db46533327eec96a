"""Whole or in halves: each rung serves in the form that was faster when it was warmed up, until traffic has judged it.

Times are ours: what a real machine says of its forms is noise here.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from runtime.adaptive.decision import DecisionLog
from runtime.adaptive.form_judge import FIRST_AFTER, HALVES, WHOLE, FormReason, Trigger, Turn
from runtime.engine.launched import CollectedStep, InFlightStep
from runtime.engine.score_reading import ScoreChunk
from runtime.engine.step_forms import StepForms, work_of
from runtime.ladder.bucket import Bucket, decode_bucket, prefill_bucket
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import ScheduledChunk, StepPlan, StepResult
from runtime.schedule.sequence import Sequence

DOCS = Path(__file__).parents[3] / "docs" / "expert_parallel.md"
FOUR, EIGHT = decode_bucket(4), decode_bucket(8)


def in_halves(rung: Bucket) -> Bucket:
    halves = rung.in_halves(num_shards=2, page_size=4)
    assert halves is not None
    return halves


@dataclass
class Served:
    """A step takes a second whole and `halves_s` in halves, at the warm-up and, if not said otherwise, in traffic."""

    halves_s: float = 1.0
    now_s: float = 0.0
    ran: list[Bucket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forms, self.decisions = StepForms(0.0, lambda: self.now_s), DecisionLog(64)

    def warm_up(self, form: Bucket) -> None:
        self.now_s += self.halves_s if form.num_halves == 2 else 1.0

    def adopt(self, rung: Bucket) -> None:
        self.forms.measure(rung, in_halves(rung), self.warm_up)
        self.forms.tell(self.decisions, self.now_s)

    def serve(self, rung: Bucket, num: int) -> None:
        for _ in range(num):
            turn = self.forms.turn(rung)
            form = self.forms.form(rung, turn)
            self.ran.append(form)
            step_s = self.halves_s if form.num_halves == 2 else 1.0
            self.now_s += step_s
            self.forms.read(step(rung, turn), collected(), step_s)
            self.forms.tell(self.decisions, self.now_s)


def chunk(start: int, num: int) -> ScheduledChunk:
    sequence = Sequence(Request("r", (1,) * 50, SamplingParams()), 0)
    return ScheduledChunk(sequence, 0, start, num, (), True, False)


def step(rung: Bucket, turn=None, *chunks: ScheduledChunk) -> InFlightStep:
    plan = StepPlan(rung.phase, chunks or (chunk(10, 4),) * rung.rows, 1)
    return InFlightStep(plan, rung, None, (), None, 0.0, turn=turn)


def collected(num_steps: int = 1, rows: tuple = ((4, 2), (3, 3))) -> CollectedStep:
    tokens = np.array([[3, 1, 2, 0], [0, 6, 0, 0]])
    return CollectedStep(StepResult(()), num_steps, tokens, (), device_rows=np.array(rows))


def test_each_rung_starts_with_its_own_warm_up():
    served = Served()
    for rung, halves_s in ((FOUR, 0.99), (EIGHT, 0.5), (decode_bucket(12), 3.0)):
        served.halves_s = halves_s
        served.adopt(rung)
    found = served.forms.choices
    assert [(c.rung, c.whole_s, c.is_in_halves, c.reason) for c in found.values()] == [
        (FOUR.name, 1.0, False, "within_margin"),  # 1 % is not enough
        (EIGHT.name, 1.0, True, "faster"),
        ("decode-12", 1.0, False, "other_slower"),
    ]
    assert found[EIGHT.name].halves_s == pytest.approx(0.5)
    assert {c.source for c in found.values()} == {"warm-up"}
    assert [served.forms.turn(rung).form for rung in (FOUR, EIGHT)] == [WHOLE, HALVES]


def test_traffic_corrects_the_warm_up_and_says_so():
    served = Served(halves_s=1.5)
    served.adopt(EIGHT)
    served.halves_s = 0.7  # what the warm-up could not see
    served.serve(EIGHT, FIRST_AFTER + 8)
    assert served.forms.choices[EIGHT.name].is_contested
    served.serve(EIGHT, 200)
    choice = served.forms.choices[EIGHT.name]
    assert (choice.is_in_halves, choice.source, choice.reason) == (True, "traffic", "faster")
    assert (choice.whole_s, choice.halves_s) == pytest.approx((1.0, 0.7))
    assert (choice.trigger, choice.num_groups, choice.is_contested) == ("first", 4, False)
    assert served.ran[-1] == in_halves(EIGHT)
    first, second = served.decisions.after(0, 10)
    assert (first.controller, first.previous, first.value, first.reason) == (
        "step_form",
        1,
        1,
        "other_slower",
    )
    assert (second.previous, second.value, second.reason) == (1, 2, "faster")
    assert second.inputs["rung"] == EIGHT.name
    assert second.inputs["source"] == "traffic"
    assert second.inputs["launches_in_other_form"] == 4 * 8


def test_numbers_of_the_warm_up_stay_where_traffic_could_not_be_compared():
    served = Served()
    served.adopt(EIGHT)
    served.halves_s = 40.0  # launches so far apart say nothing
    served.serve(EIGHT, FIRST_AFTER + 200)
    choice = served.forms.choices[EIGHT.name]
    assert (choice.source, choice.reason, choice.halves_s) == ("warm-up", FormReason.WORK_DIFFERS, 1.0)


def test_launches_of_the_other_form_tell_nothing_of_steps_to_come():
    """Half of a contest's, until a verdict makes that form the one that serves."""
    served = Served(halves_s=0.5)
    assert served.forms.is_in_serving_form(step(FOUR))  # it has one form
    served.adopt(EIGHT)
    whole, halves = step(EIGHT, Turn(WHOLE)), step(EIGHT, Turn(HALVES))
    assert [served.forms.is_in_serving_form(s) for s in (whole, halves)] == [False, True]
    served.halves_s = 3.0
    served.serve(EIGHT, FIRST_AFTER + 200)
    assert [served.forms.is_in_serving_form(s) for s in (whole, halves)] == [True, False]
    served.forms.keep(())
    assert served.forms.is_in_serving_form(halves)


def test_a_rung_that_comes_back_is_measured_anew():
    served = Served(halves_s=0.5)
    served.adopt(EIGHT)
    served.adopt(FOUR)
    served.forms.keep({FOUR})
    assert list(served.forms.choices) == [FOUR.name]
    assert served.forms.turn(EIGHT) is None
    served.halves_s = 2.0
    served.adopt(EIGHT)
    choice = served.forms.choices[EIGHT.name]
    assert (choice.whole_s, choice.halves_s, choice.is_in_halves) == (1.0, 2.0, False)


def test_a_launch_whose_rung_was_forgotten_meanwhile_is_read():
    served = Served()
    served.adopt(EIGHT)
    turn = served.forms.turn(EIGHT)
    served.forms.keep(())
    served.forms.read(step(EIGHT, turn), collected(), 1.0)
    assert served.forms.choices == {}


@pytest.mark.parametrize(
    ("is_forced", "form", "reason"), [(True, HALVES, "config"), (False, WHOLE, "other_slower")]
)
def test_what_is_fixed_is_not_judged(is_forced, form, reason):
    served = Served(halves_s=3.0)
    served.forms.is_forced, served.forms.is_judging = is_forced, is_forced
    served.adopt(EIGHT)
    served.halves_s = 0.1 if form == WHOLE else 9.0
    served.serve(EIGHT, 1000)
    assert set(served.ran) == {(EIGHT, in_halves(EIGHT))[form]}
    choice = served.forms.choices[EIGHT.name]
    assert (choice.is_in_halves, choice.reason) == (form == HALVES, reason)
    assert len(served.decisions.after(0, 10)) == 1


def test_switched_off_amid_a_contest_the_form_that_served_goes_on():
    served = Served(halves_s=1.5)
    served.adopt(EIGHT)
    served.serve(EIGHT, FIRST_AFTER + 6)
    assert in_halves(EIGHT) in served.ran
    served.forms.is_judging, served.ran = False, []
    served.serve(EIGHT, 100)
    assert set(served.ran) == {EIGHT}
    assert not served.forms.choices[EIGHT.name].is_contested
    served.forms.is_judging = True
    served.serve(EIGHT, 400)
    assert served.forms.choices[EIGHT.name].source == "traffic"


def test_a_rung_of_one_form_has_nothing_to_choose():
    forms = StepForms(0.0)
    assert forms.turn(FOUR) is None
    assert forms.form(FOUR, None) is FOUR
    forms.read(step(FOUR), collected(), 1.0)
    assert forms.choices == {}


def test_work_of_a_launch():
    """Keys: of each token those before it. Rows and tokens: of each layer's busiest device and expert, in one step."""
    work = work_of(step(EIGHT, None, chunk(10, 4), chunk(20, 4)), collected(4), 100.0)
    assert work == (4, 2, 117.0, 9 / 4, 1, 7 / 4)
    prefill = prefill_bucket(64, 4, 8)
    launched = step(prefill, None, chunk(0, 30), chunk(100, 10))
    assert work_of(launched, collected(), 0.0) == (1, 40, (30 * 15 + 10 * 105) / 40, 9, 1, 7)
    scores = tuple(
        ScoreChunk(c.sequence, 1, np.zeros(64), (), c.num_tokens - 1) for c in launched.plan.chunks
    )
    assert work_of(replace(launched, scores=scores), collected(), 0.0).scored == 1 + 29 + 9
    assert work_of(step(FOUR), collected(0, rows=np.zeros((0, 0))), 0.0).busiest_rows == 0


@pytest.mark.parametrize("reason", [*FormReason, *Trigger])
def test_every_reason_is_explained(reason):
    assert f"`{reason}`" in DOCS.read_text(encoding="utf-8")
