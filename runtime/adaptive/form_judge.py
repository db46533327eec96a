"""FormJudge: which of a rung's two compiled forms serves, judged by launches of traffic. Pure; imports no JAX.

In a *contest* the forms take turns by blocks of launches, S the form that serves and O the other:

    group 1  SSSS OOOO OOOO SSSS    group 2  OOOO SSSS SSSS OOOO    group 3  as group 1 ...

Within a group launches of both forms are paired by like work; it says one number, the median logarithm of the ratio of
their step times, and counts if there are pairs enough. A drift cancels out. The contest ends when Student's t of the groups'
numbers is clear of the margin, or after MAX_GROUPS. The other form serves from then on if it was faster by the margin.
Either form needs that to replace the other, so two that are nearly equal do not change places. Then the rung rests, in
proportion to the launches that the other form had.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import NamedTuple

WHOLE, HALVES = 0, 1  # the two forms
MIN_GAIN = 0.02  # less is noise
BLOCK = 4  # launches in a row in one form
GROUP = 4 * BLOCK
MIN_PAIRS = 3  # of the eight that a group can have
MIN_GROUPS, MAX_GROUPS = 4, 12
CLEARLY_SLOWER = 0.1  # in each of the first two groups: no more are needed
ALIKE = 0.1  # two works whose figures differ by less can be compared
CHANGED = 0.3  # a work whose figures differ by more is another one
OTHER_SHARE = 0.01  # of a rung's launches that contests may give to the form that does not serve, but for a first contest
SMOOTHING = 1 / 128  # weight of the newest launch in the work of late
GROUP_S = 120.0  # launches further apart say nothing of each other
FIRST_AFTER = 64  # launches of traffic before the first contest
CHANGE_AFTER_S = 60.0  # the least time from a verdict to a contest because the work changed
PERIOD_S, MAX_PERIOD_S = (
    600.0,
    4800.0,
)  # from a verdict to the next contest; doubled by each that changes nothing
# One-sided 99 % quantiles of Student's t by degrees of freedom from MIN_GROUPS - 1 on (any table of the distribution).
T_99 = (4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718)


class FormReason(StrEnum):
    """Why a form serves; docs/expert_parallel.md explains each."""

    FASTER = "faster"  # it was the other one, and won by the margin
    OTHER_SLOWER = "other_slower"
    WITHIN_MARGIN = "within_margin"  # the other one is no slower, but does not win by the margin
    UNSETTLED = "unsettled"  # the groups differ too much to say
    WORK_DIFFERS = "work_differs"  # too few groups had both forms do like work
    CONFIG = "config"  # nothing was judged


class Trigger(StrEnum):
    """Why a contest was made."""

    FIRST = "first"
    WORK_CHANGED = "work_changed"
    PERIOD = "period"


class LaunchWork(NamedTuple):
    """What a launch's step time depends on. tokens: of one step, all shards. token_work: keys that a token attends to, on
    average, and those that its linear part is worth (`runtime.model.halves`).

    busiest_expert: tokens of each layer's busiest expert in one step, summed over layers. scored: one more than the prompt
    tokens whose log probabilities were asked for. busiest_rows: experts' rows of the busiest device in one step, summed over
    layers: placement is in it, but the form too, as each half levels the copies' rows for itself.
    """

    num_steps: float
    tokens: float
    token_work: float
    busiest_expert: float
    scored: float
    busiest_rows: float

    def distance(self, other: "LaunchWork") -> float:
        """Of the figure that differs most, the logarithm of the ratio; 0 where all are equal."""
        return _distance(self, other)

    def distance_across_forms(self, other: "LaunchWork") -> float:
        """The same by what was asked for alone, which no form changes."""
        return _distance(self[:-1], other[:-1])


@dataclass(frozen=True, slots=True)
class Turn:
    """The form of a launch; in a contest, which group it is part of, counted over the judge's life, and 0 outside."""

    form: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class FormVerdict:
    """The end of a contest: the form that serves, and what was measured.

    times_s: seconds of a step by form, geometric mean over the groups that count; None where they
    were too few to say anything.
    other_launches: of the contest, in the form that did not serve.
    """

    form: int
    is_change: bool
    reason: FormReason
    trigger: Trigger
    times_s: tuple[float, float] | None
    num_groups: int  # that count
    other_launches: int


@dataclass(frozen=True, slots=True)
class _Reading:
    form: int
    step_s: float
    work: LaunchWork


class FormJudge:
    """Of one rung. `turn` for each launch, `read` when its time is known, which may be late or never."""

    def __init__(self, serving: int, now_s: float) -> None:
        """serving: the form that serves until traffic says otherwise."""
        self.serving = serving
        self.is_contested = False
        self._verdict_s = now_s
        self._launches = 0  # since the last verdict
        self._rest = FIRST_AFTER  # launches from the last verdict to the next contest, at least
        self._period_s = 0.0
        self._judged_work: LaunchWork | None = None  # that the last verdict was for
        self._recent_work: LaunchWork | None = None
        self._trigger = Trigger.FIRST
        self._group = 0  # the newest, over the judge's life
        self._group_s = 0.0  # when it began
        self._group_launches = 0
        self._readings: list[_Reading] = []
        self._num_groups = self._other_launches = 0  # of this contest
        self._counted: list[tuple[float, float]] = []  # its groups that count: log step time by form
        self._works: list[tuple[int, LaunchWork]] = []  # of its launches that were read, with their forms

    def turn(self, now_s: float) -> Turn:
        """The form that this launch takes."""
        if not self.is_contested:
            self._launches += 1
            trigger = self._due(now_s)
            if trigger is None:
                return Turn(self.serving)
            self._begin(trigger, now_s)
        if now_s - self._group_s > GROUP_S:
            if self._num_groups == MAX_GROUPS:  # the last one will not be whole any more
                return Turn(self.serving)
            self._next_group(now_s)
        place = self._group_launches
        if place == GROUP:  # its end has not been read yet
            return Turn(self.serving)
        self._group_launches += 1
        is_inner = BLOCK <= place < 3 * BLOCK
        is_other = is_inner == (self._num_groups % 2 == 1)
        self._other_launches += is_other
        return Turn(1 - self.serving if is_other else self.serving, self._group)

    def is_taking_turns(self, now_s: float) -> bool:
        """In a contest that launches go on with; not one that waits, for hours perhaps, for a rung to be used again."""
        return self.is_contested and now_s - self._group_s <= GROUP_S

    def read(self, turn: Turn, step_s: float, work: LaunchWork, now_s: float) -> FormVerdict | None:
        """A launch's seconds by step and its work; the verdict where it was the last that this needs."""
        if not self.is_contested:
            if turn.form == self.serving:
                self._note(work)
            return None
        if now_s - self._group_s > GROUP_S and self._num_groups == MAX_GROUPS:
            return self._end(now_s)
        if turn.group != self._group or not step_s > 0:
            return None
        self._readings.append(_Reading(turn.form, step_s, work))
        if len(self._readings) < GROUP:
            return None
        self._count_group()
        reason = self._reason()
        if reason is None and self._num_groups < MAX_GROUPS:
            self._next_group(now_s)
            return None
        return self._end(now_s)

    def _due(self, now_s: float) -> Trigger | None:
        """Whether a contest is to be made now, and why."""
        if self._launches <= self._rest:
            return None
        waited_s = now_s - self._verdict_s
        if self._judged_work is None:
            return Trigger.FIRST if waited_s >= self._period_s else None
        assert self._recent_work is not None  # set with it
        if waited_s >= CHANGE_AFTER_S and self._judged_work.distance(self._recent_work) > CHANGED:
            return Trigger.WORK_CHANGED
        return Trigger.PERIOD if waited_s >= self._period_s else None

    def _begin(self, trigger: Trigger, now_s: float) -> None:
        self.is_contested, self._trigger = True, trigger
        self._num_groups = self._other_launches = 0
        self._counted, self._works = [], []
        self._next_group(now_s)

    def _next_group(self, now_s: float) -> None:
        self._group += 1
        self._num_groups += 1
        self._group_s, self._group_launches, self._readings = now_s, 0, []

    def _note(self, work: LaunchWork) -> None:
        before = self._recent_work or work
        pairs = zip(before, work, strict=True)
        self._recent_work = LaunchWork(*(a + SMOOTHING * (b - a) for a, b in pairs))

    def _count_group(self) -> None:
        """What the group says, if enough launches of both forms had like work to do."""
        self._works += [(r.form, r.work) for r in self._readings]
        whole, halves = ([r for r in self._readings if r.form == form] for form in (WHOLE, HALVES))
        pairs = [(math.log(w.step_s), math.log(h.step_s)) for w, h in _alike(whole, halves)]
        if len(pairs) < MIN_PAIRS:
            return
        middle, ratio = median((w + h) / 2 for w, h in pairs), median(h - w for w, h in pairs)
        self._counted.append((middle - ratio / 2, middle + ratio / 2))

    def _reason(self) -> FormReason | None:
        """What the groups so far say; None: not enough. Times as logarithms of the other form's over the serving one's."""
        other, won = 1 - self.serving, math.log(1 - MIN_GAIN)
        ratios = [times[other] - times[self.serving] for times in self._counted]
        if len(ratios) >= 2 and min(ratios) > math.log(1 + CLEARLY_SLOWER):
            return FormReason.OTHER_SLOWER
        if len(ratios) < MIN_GROUPS:
            return None
        mean = fmean(ratios)
        error = T_99[len(ratios) - MIN_GROUPS] * stdev(ratios) / math.sqrt(len(ratios))
        if mean <= won and mean + error < 0:
            return FormReason.FASTER
        if mean - error > 0:
            return FormReason.OTHER_SLOWER
        return FormReason.WITHIN_MARGIN if mean - error > won else None

    def _end(self, now_s: float) -> FormVerdict:
        reason = self._reason()
        if reason is None:
            is_enough = len(self._counted) >= MIN_GROUPS
            reason = FormReason.UNSETTLED if is_enough else FormReason.WORK_DIFFERS
        is_change = reason is FormReason.FASTER
        self.serving = 1 - self.serving if is_change else self.serving
        times = None
        if len(self._counted) >= MIN_GROUPS or reason is FormReason.OTHER_SLOWER:
            whole, halves = (math.exp(fmean(column)) for column in zip(*self._counted, strict=True))
            times = whole, halves
        if is_change or self._trigger is Trigger.WORK_CHANGED:
            self._period_s = PERIOD_S
        else:
            self._period_s = min(MAX_PERIOD_S, max(PERIOD_S, 2 * self._period_s))
        self._rest = math.ceil(self._other_launches / OTHER_SHARE)
        works = [work for form, work in self._works if form == self.serving]
        means = map(fmean, zip(*works, strict=True)) if works else None
        self._judged_work = self._recent_work = means and LaunchWork(*means)
        self.is_contested, self._verdict_s, self._launches = False, now_s, 0
        return FormVerdict(
            self.serving,
            is_change,
            reason,
            self._trigger,
            times,
            len(self._counted),
            self._other_launches,
        )


def _distance(some: Iterable[float], others: Iterable[float]) -> float:
    return max(abs(math.log(max(a, 1.0) / max(b, 1.0))) for a, b in zip(some, others, strict=True))


def _alike(some: Sequence[_Reading], others: Sequence[_Reading]) -> Iterator[tuple[_Reading, _Reading]]:
    """Pairs of like work, the most alike first; each reading is in one at most."""
    by_distance = sorted(
        (a.work.distance_across_forms(b.work), i, j) for i, a in enumerate(some) for j, b in enumerate(others)
    )
    left, right = set(range(len(some))), set(range(len(others)))
    for distance, i, j in by_distance:
        if distance <= ALIKE and i in left and j in right:
            left.remove(i)
            right.remove(j)
            yield some[i], others[j]
