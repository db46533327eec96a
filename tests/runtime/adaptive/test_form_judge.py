"""Which form of a rung serves: the faster one, whatever the noise, at a bounded price, and without changing to and fro."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.adaptive import form_judge
from runtime.adaptive.form_judge import (
    FIRST_AFTER,
    GROUP,
    GROUP_S,
    HALVES,
    MAX_GROUPS,
    MIN_GAIN,
    MIN_GROUPS,
    OTHER_SHARE,
    PERIOD_S,
    WHOLE,
    FormJudge,
    FormReason,
    FormVerdict,
    LaunchWork,
    Trigger,
    Turn,
)

WORK = LaunchWork(num_steps=4, tokens=8, token_work=200, busiest_expert=300, scored=5, busiest_rows=900)
ONE_CONTEST = MAX_GROUPS * GROUP // 2  # most launches that it gives to the other form


@dataclass
class Rung:
    """A rung in traffic with a clock of its own, two launches in flight as in the engine's loop."""

    step_s: Callable[[int], float]  # by form
    judge: FormJudge = field(default_factory=lambda: FormJudge(WHOLE, 0.0))
    work: Callable[[int], LaunchWork] = lambda form: WORK
    now_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    num_other: int = 0  # launches in the form that did not serve
    verdicts: list[FormVerdict] = field(default_factory=list)
    in_flight: deque[Turn] = field(default_factory=deque)

    def launch(self, times: int = 1) -> None:
        for _ in range(times):
            turn = self.judge.turn(self.now_s)
            self.num_other += turn.form != self.judge.serving
            self.turns.append(turn)
            self.in_flight.append(turn)
            if len(self.in_flight) == 2:
                self.collect()

    def collect(self) -> None:
        turn = self.in_flight.popleft()
        seconds = self.step_s(turn.form)
        self.now_s += seconds
        verdict = self.judge.read(turn, seconds, self.work(turn.form), self.now_s)
        if verdict is not None:
            self.verdicts.append(verdict)


def noisy(rng: random.Random, ratio: float, noise: float, outliers: float = 0.02) -> Callable[[int], float]:
    """Halves take `ratio` of the whole's 50 ms; some launches wait for something else and take five times as long."""

    def step_s(form: int) -> float:
        slow = 5.0 if rng.random() < outliers else 1.0
        return 0.05 * (ratio if form == HALVES else 1.0) * rng.lognormvariate(0.0, noise) * slow

    return step_s


def steady(ratio: float) -> Callable[[int], float]:
    return lambda form: 0.05 * (ratio if form == HALVES else 1.0)


@pytest.mark.parametrize(("ratio", "noise"), [(0.95, 0.03), (0.9, 0.06), (0.7, 0.15)])
@pytest.mark.parametrize("slower_serves", [True, False])
def test_the_faster_form_serves_after_one_contest(ratio, noise, slower_serves):
    for seed in range(30):
        start = WHOLE if slower_serves else HALVES
        rung = Rung(noisy(random.Random(seed), ratio, noise), FormJudge(start, 0.0))
        rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
        assert rung.judge.serving == HALVES
        (verdict,) = rung.verdicts
        assert verdict.is_change is slower_serves
        assert (verdict.reason is FormReason.FASTER) is slower_serves
        assert verdict.times_s is not None
        assert verdict.times_s[HALVES] / verdict.times_s[WHOLE] == pytest.approx(ratio, rel=3 * noise)


@given(st.floats(0.2, 5.0), st.sampled_from([WHOLE, HALVES]))
@settings(deadline=None)
def test_without_noise_a_form_changes_exactly_when_the_other_wins_by_the_margin(ratio, serving):
    rung = Rung(steady(ratio), FormJudge(serving, 0.0))
    rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
    (verdict,) = rung.verdicts
    other = ratio if serving == WHOLE else 1 / ratio  # its time over the serving one's
    if abs(other - (1 - MIN_GAIN)) > 1e-9:
        assert verdict.is_change == (other < 1 - MIN_GAIN)
    assert verdict.form == rung.judge.serving
    assert verdict.times_s == pytest.approx((0.05, 0.05 * ratio))
    assert verdict.trigger is Trigger.FIRST


def test_a_form_that_is_far_slower_is_tried_for_two_groups_only():
    rung = Rung(steady(3.0))
    rung.launch(2000)
    (verdict,) = rung.verdicts
    assert (verdict.reason, verdict.num_groups) == (FormReason.OTHER_SLOWER, 2)
    assert rung.num_other == verdict.other_launches == GROUP


def test_a_drift_of_the_machine_is_no_gain():
    """It gets 0.2 % slower with each launch; the forms are equal."""
    rung = Rung(lambda form: 0.05)
    rung.step_s = lambda form: 0.05 * 1.002 ** len(rung.turns)
    rung.launch(300)
    (verdict,) = rung.verdicts
    assert verdict.reason is FormReason.WITHIN_MARGIN
    assert verdict.times_s is not None
    assert verdict.times_s[WHOLE] == pytest.approx(verdict.times_s[HALVES], rel=0.004)


def test_groups_whose_forms_had_other_work_do_not_count():
    """Halves look faster here because their launches had half of the rows."""
    rung = Rung(steady(0.5))
    rung.work = lambda form: WORK._replace(tokens=4 if form == HALVES else 8)
    rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
    (verdict,) = rung.verdicts
    assert (verdict.reason, verdict.num_groups, verdict.times_s) == (FormReason.WORK_DIFFERS, 0, None)
    assert rung.judge.serving == WHOLE


@pytest.mark.parametrize("figure", LaunchWork._fields[:-1])
def test_each_figure_of_what_was_asked_for_keeps_launches_apart(figure):
    rung = Rung(steady(0.5))
    rung.work = lambda form: WORK._replace(**{figure: (1 + form) * getattr(WORK, figure)})
    rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
    (verdict,) = rung.verdicts
    assert (verdict.reason, verdict.num_groups) == (FormReason.WORK_DIFFERS, 0)


def test_rows_that_the_form_itself_makes_unequal_are_compared_and_are_no_other_work_afterwards():
    """Each half levels copies for itself: its busiest device has half as much again. The faster form takes over."""
    rung = Rung(steady(0.8))
    rung.work = lambda form: WORK._replace(busiest_rows=900 * (1 + form / 2))
    rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
    (verdict,) = rung.verdicts
    assert (verdict.form, verdict.reason) == (HALVES, FormReason.FASTER)
    rung.launch(int(0.9 * PERIOD_S / 0.04))
    assert len(rung.verdicts) == 1


@pytest.mark.parametrize("num_alike", [1, MIN_GROUPS - 1])
def test_too_few_groups_say_no_times(num_alike):
    """The first groups could be compared; then the two forms never have like work again."""
    rung = Rung(steady(0.5))
    rung.work = lambda form: WORK._replace(tokens=8 * (1 + form) if rung.judge._num_groups > num_alike else 8)
    rung.launch(FIRST_AFTER + MAX_GROUPS * (GROUP + 2) + 2)
    (verdict,) = rung.verdicts
    assert (verdict.reason, verdict.num_groups) == (FormReason.WORK_DIFFERS, num_alike)
    assert verdict.times_s is None
    assert rung.judge.serving == WHOLE


def test_a_contest_of_a_rung_that_is_not_used_any_more_is_not_under_way():
    rung = Rung(steady(0.8))
    rung.launch(FIRST_AFTER + 3)
    assert rung.judge.is_taking_turns(rung.now_s)
    assert not rung.judge.is_taking_turns(rung.now_s + 2 * GROUP_S)
    rung.now_s += 2 * GROUP_S
    rung.launch(2)
    assert rung.judge.is_taking_turns(rung.now_s)


def test_launches_far_apart_are_not_compared_and_a_contest_ends_all_the_same():
    rung = Rung(lambda form: GROUP_S / 10)
    rung.launch(FIRST_AFTER + MAX_GROUPS * GROUP + 2)
    assert [v.reason for v in rung.verdicts] == [FormReason.WORK_DIFFERS]
    assert not rung.judge.is_contested


def test_what_is_never_read_holds_up_nothing():
    """Two launches are lost in each group: it is given up for the next one, and the contest ends."""
    rung = Rung(steady(0.8))
    rung.launch(FIRST_AFTER + 3)
    assert rung.judge.is_contested
    for _ in range(MAX_GROUPS):
        rung.launch()
        rung.in_flight.clear()
        rung.launch(GROUP + 4)
        assert rung.judge.is_contested
        before = rung.num_other
        rung.launch(10)
        assert rung.num_other == before  # the form that serves serves, until the group is given up
        rung.now_s += 2 * GROUP_S
    rung.launch(4)
    assert not rung.judge.is_contested
    assert rung.judge.serving == WHOLE


def test_forms_that_are_nearly_equal_do_not_change_places():
    """A day of launches: each change needs a measured gain in its own direction, so one may happen and hardly a second."""
    num_contests = num_changes = 0
    for seed in range(8):
        rung = Rung(noisy(random.Random(seed), 1 - 0.005 * (seed % 3 - 1), 0.05))
        rung.launch(20_000)
        changes = sum(v.is_change for v in rung.verdicts)
        assert changes <= 1
        num_contests, num_changes = num_contests + len(rung.verdicts), num_changes + changes
    assert num_contests >= 8 * 2
    assert num_changes <= 2


def test_contests_that_change_nothing_get_rarer():
    rung = Rung(steady(1.2))
    gaps = []
    for _ in range(5):
        before_s = rung.now_s
        while not rung.judge.is_contested:
            rung.launch()
            rung.now_s += 0.25
        while rung.judge.is_contested:
            rung.launch()
        gaps.append(rung.now_s - before_s)
    rising = [PERIOD_S, 2 * PERIOD_S, 4 * PERIOD_S, 8 * PERIOD_S]
    assert gaps[1:] == pytest.approx(rising, rel=0.15)
    assert [v.trigger for v in rung.verdicts] == [Trigger.FIRST, *[Trigger.PERIOD] * 4]


@pytest.mark.parametrize("figure", LaunchWork._fields)
def test_other_work_is_judged_anew_before_the_period(figure):
    """Halves lose at first, and win once that figure of the work has doubled."""
    rung = Rung(steady(1.2))
    rung.launch(6000)
    assert [v.form for v in rung.verdicts] == [WHOLE]
    rung.work = lambda form: WORK._replace(**{figure: 2 * getattr(WORK, figure)})
    rung.step_s = steady(0.8)
    start_s = rung.now_s
    while len(rung.verdicts) < 2:
        rung.launch()
    assert rung.now_s - start_s < 60.0 < PERIOD_S
    assert (rung.verdicts[1].trigger, rung.verdicts[1].form) == (Trigger.WORK_CHANGED, HALVES)


def test_the_same_work_with_its_usual_ups_and_downs_is_not_judged_anew():
    rng = random.Random(1)
    rung = Rung(steady(1.2))
    rung.work = lambda form: LaunchWork(
        rng.choice([1, 4, 4, 8]), rng.randint(5, 8), rng.randint(50, 900), 200, 1, 500
    )
    rung.launch(int(PERIOD_S / 0.05))
    assert len(rung.verdicts) == 1


REGIMES = st.lists(
    st.tuples(
        st.floats(0.3, 3.0),  # halves' time over the whole's
        st.floats(0.0, 0.5),  # noise
        st.floats(1e-3, 30.0),  # seconds of a step
        st.floats(0.1, 10.0),  # its work
        st.integers(1, 1500),  # launches
        st.floats(0.0, 1e5),  # seconds without traffic after them
    ),
    min_size=1,
    max_size=6,
)


@given(REGIMES, st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_the_price_is_bounded_whatever_traffic_does(regimes, seed):
    rng = random.Random(seed)
    rung = Rung(lambda form: 0.0)
    for ratio, noise, step_s, size, num, idle_s in regimes:
        rung.work = lambda form, size=size: WORK._replace(tokens=8 * size * rng.uniform(0.9, 1.1))
        times = noisy(rng, ratio, noise)
        rung.step_s = lambda form, times=times, step_s=step_s: times(form) * step_s / 0.05
        for _ in range(num):
            rung.launch()
            assert rung.num_other <= ONE_CONTEST + OTHER_SHARE * len(rung.turns)
        rung.now_s += idle_s
    for verdict in rung.verdicts:
        assert verdict.other_launches <= ONE_CONTEST
        if verdict.is_change:
            assert verdict.times_s is not None
            assert verdict.num_groups >= MIN_GROUPS
            won, lost = verdict.times_s[verdict.form], verdict.times_s[1 - verdict.form]
            assert won <= lost * (1 - MIN_GAIN) * (1 + 1e-9)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan])
def test_a_clock_that_stands_still_says_nothing(step_s):
    judge = FormJudge(WHOLE, 0.0)
    for _ in range(500):
        assert judge.read(judge.turn(0.0), step_s, WORK, 0.0) is None
    assert judge.serving == WHOLE


def test_the_table_of_quantiles_is_students():
    """Each is where the distribution's tail is 1 %: the density is integrated to it."""
    assert len(form_judge.T_99) == MAX_GROUPS - MIN_GROUPS + 1
    for freedom, t in enumerate(form_judge.T_99, MIN_GROUPS - 1):
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
        density = [
            scale / math.sqrt(freedom * math.pi) * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
            for x in (t * i / 2000 for i in range(2001))
        ]
        body = (sum(density) - (density[0] + density[-1]) / 2) * t / 2000
        assert 0.5 - body == pytest.approx(0.01, abs=2e-5)
