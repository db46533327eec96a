"""StepForms: each rung whole or as two micro-batches, as measured at its warm-up and then in traffic.

Owned by the engine's thread. A decode rung's warm-up computes one token in all rows: neither its attention nor its exchange
is that of traffic. So that verdict holds only until launches of traffic have judged the rung (`runtime.adaptive.form_judge`).
"""

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from runtime.adaptive.decision import DecisionLog
from runtime.adaptive.form_judge import (
    HALVES,
    MIN_GAIN,
    WHOLE,
    FormJudge,
    FormReason,
    FormVerdict,
    LaunchWork,
    Turn,
)
from runtime.engine.expert_status import OverlapChoice
from runtime.engine.launched import CollectedStep, InFlightStep
from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase

MEASURED_TURNS = 3


@dataclass(slots=True)
class _Rung:
    forms: tuple[Bucket, Bucket]  # whole, in halves
    judge: FormJudge
    choice: OverlapChoice


class StepForms:
    """Rungs that have two compiled forms; the others have nothing to choose, and are not here."""

    def __init__(self, linear_keys: float, clock: Callable[[], float] = time.monotonic) -> None:
        """linear_keys: keys that cost as much to attend to as a token's projections."""
        self.is_forced = False  # halves wherever they are compiled, unmeasured in traffic
        self.is_judging = True  # in traffic
        self._linear_keys, self._clock = linear_keys, clock
        self._rungs: dict[Bucket, _Rung] = {}
        self._news: list[tuple[int, OverlapChoice, int]] = []  # form before, choice, launches it took

    @property
    def choices(self) -> Mapping[str, OverlapChoice]:
        """By rung."""
        is_judging, now_s = self.is_judging and not self.is_forced, self._clock()
        return {
            rung.name: replace(r.choice, is_contested=is_judging and r.judge.is_taking_turns(now_s))
            for rung, r in self._rungs.items()
        }

    def keep(self, rungs: Container[Bucket]) -> None:
        """Forget all others: one that comes back is measured anew."""
        self._rungs = {rung: r for rung, r in self._rungs.items() if rung in rungs}

    def measure(self, rung: Bucket, halves: Bucket, run: Callable[[Bucket], None]) -> None:
        """Choose by warm-up steps of both forms in turns, judged by the fastest of each. run: one, until it has ended."""
        run(halves)
        times: dict[Bucket, list[float]] = {rung: [], halves: []}
        for form in (rung, halves) * MEASURED_TURNS:
            start = self._clock()
            run(form)
            times[form].append(self._clock() - start)
        whole_s, halves_s = min(times[rung]), min(times[halves])
        is_faster = halves_s < whole_s * (1 - MIN_GAIN)
        reason = FormReason.OTHER_SLOWER if halves_s > whole_s else FormReason.WITHIN_MARGIN
        reason = FormReason.FASTER if is_faster else reason
        if self.is_forced:
            reason = FormReason.CONFIG
        is_in_halves = is_faster or self.is_forced
        choice = OverlapChoice(rung.name, whole_s, halves_s, is_in_halves, "warm-up", reason.value)
        judge = FormJudge(HALVES if is_in_halves else WHOLE, self._clock())
        self._rungs[rung] = _Rung((rung, halves), judge, choice)
        self._news.append((WHOLE, choice, 0))

    def turn(self, rung: Bucket) -> Turn | None:
        """What a launch of traffic takes; None where the rung has one form."""
        found = self._rungs.get(rung)
        if found is None:
            return None
        if self.is_forced or not self.is_judging:
            return Turn(found.judge.serving)
        return found.judge.turn(self._clock())

    def form(self, rung: Bucket, turn: Turn | None) -> Bucket:
        return rung if turn is None else self._rungs[rung].forms[turn.form]

    def is_in_serving_form(self, step: InFlightStep) -> bool:
        """False for what a contest launches in the other one: its time is not that of steps to come."""
        found = self._rungs.get(step.bucket)
        return found is None or step.turn is None or step.turn.form == found.judge.serving

    def read(self, step: InFlightStep, collected: CollectedStep, step_s: float) -> None:
        """A launch was read; `step_s` seconds for each of its steps."""
        found = self._rungs.get(step.bucket)
        if found is None or step.turn is None or self.is_forced or not self.is_judging:
            return
        serving = found.judge.serving
        work = work_of(step, collected, self._linear_keys)
        verdict = found.judge.read(step.turn, step_s, work, self._clock())
        if verdict is not None:
            found.choice = _judged(found.choice, verdict)
            self._news.append((serving, found.choice, verdict.other_launches))

    def tell(self, decisions: DecisionLog, now_s: float) -> None:
        """What was decided since the last call, into the log: micro-batches of a step before and from now on."""
        for before, choice, num_launches in self._news:
            inputs = {
                "rung": choice.rung,
                "whole_s": choice.whole_s,
                "halves_s": choice.halves_s,
                "source": choice.source,
                "trigger": choice.trigger,
                "groups": choice.num_groups,
                "launches_in_other_form": num_launches,
            }
            decisions.add(now_s, "step_form", before + 1, choice.is_in_halves + 1, choice.reason, inputs)
        self._news.clear()


def work_of(step: InFlightStep, collected: CollectedStep, linear_keys: float) -> LaunchWork:
    """What a launch of traffic had to do. Keys of decode: as many as at its middle step."""
    chunks, num_steps = step.plan.chunks, max(1, collected.num_steps)
    num_tokens = max(1, step.plan.num_tokens)
    if step.plan.phase is Phase.PREFILL:
        keys = sum(c.num_tokens * (c.start + c.num_tokens / 2) for c in chunks)
    else:
        keys = sum(c.start for c in chunks) + num_tokens * num_steps / 2
    busiest_expert = float(collected.expert_tokens.max(axis=1, initial=0).sum())
    busiest_rows = float(collected.device_rows.max(axis=1, initial=0).sum())
    return LaunchWork(
        num_steps,
        num_tokens,
        linear_keys + keys / num_tokens,
        busiest_expert / num_steps,
        1 + sum(part.num for part in step.scores),
        busiest_rows / num_steps,
    )


def _judged(before: OverlapChoice, verdict: FormVerdict) -> OverlapChoice:
    """Where too few groups counted, the numbers stay those of before."""
    choice = replace(
        before,
        is_in_halves=verdict.form == HALVES,
        reason=verdict.reason.value,
        trigger=verdict.trigger.value,
        num_groups=verdict.num_groups,
    )
    if verdict.times_s is None:
        return choice
    return replace(choice, whole_s=verdict.times_s[WHOLE], halves_s=verdict.times_s[HALVES], source="traffic")
