"""What a launch says to statistics and controllers, where it took the form of its rung that does not serve and where it did."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from runtime.engine.launched import CollectedStep, InFlightStep
from runtime.engine.stats import EngineStats
from runtime.engine.steering import Steering
from runtime.engine.step_counts import count_step
from runtime.ladder.bucket import decode_bucket
from runtime.schedule.plan import Phase, StepPlan, StepResult

EIGHT = decode_bucket(8)


@dataclass
class Told:
    """Stands where Steering does, and notes what it is told."""

    is_in_form: bool = True
    told: list[str] = field(default_factory=list)

    def is_in_serving_form(self, step: InFlightStep) -> bool:
        return self.is_in_form

    def on_step(self, phase: Phase, step_s: float) -> None:
        self.told.append(f"{phase} {step_s}")

    def on_experts(self, *args: Any) -> None:
        self.told.append("experts")

    def on_form(self, *args: Any) -> None:
        self.told.append("form")


def test_a_contests_other_form_counts_as_work_and_not_as_the_rungs_step_time() -> None:
    stats, told = EngineStats(clock=lambda: 5.0), Told()
    step = InFlightStep(StepPlan(Phase.DECODE, (), 2), EIGHT, None, (), cast("Any", None), 0.0, size=8)
    collected = CollectedStep(StepResult(()), 2, np.ones((1, 4), np.int64), ())
    for told.is_in_form, busy_s in ((True, 1.0), (False, 9.0), (True, 1.0)):
        count_step(stats, cast("Steering", told), step, collected, busy_s)
    rung = stats.rungs[EIGHT.name]
    assert (rung.hits, rung.busy_s, list(rung.step_s)) == (3, 11.0, [0.5, 0.5])
    assert stats.phases["decode"].busy_s == 11.0
    usual, other = ["decode 0.5", "experts", "form"], ["experts", "form"]
    assert told.told == [*usual, *other, *usual]


def test_without_controllers_every_launch_counts() -> None:
    stats = EngineStats(clock=lambda: 5.0)
    step = InFlightStep(StepPlan(Phase.DECODE, (), 1), EIGHT, None, (), cast("Any", None), 0.0, size=8)
    count_step(stats, None, step, CollectedStep(StepResult(()), 1, np.ones((1, 4), np.int64), ()), 2.0)
    assert list(stats.rungs[EIGHT.name].step_s) == [2.0]
