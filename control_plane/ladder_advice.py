"""What the demand of a serving engine says about its ladder, and what a change of the ladder brought. No HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.config import EngineConfig
from runtime.engine.stats import EngineSnapshot
from runtime.ladder.bucket import Bucket
from runtime.ladder.learned import (
    Demand,
    LadderProposal,
    Padding,
    RungCost,
    learn_ladder,
    padding_of,
)
from runtime.schedule.plan import Phase

MAX_WEIGHT = 10.0
MIN_MEASURED = 3  # rungs of a phase: a line through two says nothing about its own error
MIN_GAIN = (
    0.005  # share of the positions; below it the next day's demand differs by more than the change brings
)

type Sizes = Mapping[Phase, tuple[int, ...]]


def propose(snapshot: EngineSnapshot, config: EngineConfig) -> LadderProposal:
    """The ladder for what was asked for since the start. Raises ValueError, with why, when there is none to propose."""
    return learn_ladder(snapshot.demand, config, rung_costs(snapshot), weights=position_weights(snapshot))


def position_weights(snapshot: EngineSnapshot) -> dict[Phase, float]:
    """What one more position adds to a step's time, decode in units of prefill; 1 until both are measured.

    Bounded: times of few launches are noisy, and no phase shall lose all its rungs to that.
    """
    seconds = {phase: _seconds_per_position(snapshot, phase) for phase in Phase}
    prefill, decode = seconds[Phase.PREFILL], seconds[Phase.DECODE]
    if prefill is None or decode is None or prefill <= 0:
        return dict.fromkeys(Phase, 1.0)
    return {Phase.PREFILL: 1.0, Phase.DECODE: min(MAX_WEIGHT, max(1 / MAX_WEIGHT, decode / prefill))}


def rung_costs(snapshot: EngineSnapshot) -> dict[Bucket, RungCost]:
    """The rungs in force but for those that failed."""
    return {
        _bucket(rung.name, Phase(rung.phase), rung.size): RungCost(rung.compile_s, rung.temp_bytes)
        for rung in snapshot.rungs
        if rung.state != "failed"
    }


def ladder_patch(proposal: LadderProposal) -> dict[str, Any]:
    """The merge patch that puts a proposal in force."""
    return {
        "ladder": {
            "prefill_tokens": list(proposal.prefill_tokens),
            "decode_rows": list(proposal.decode_rows),
        }
    }


@dataclass(frozen=True, slots=True)
class RealisedGain:
    """Padding of the traffic that came since the swap: as it is, and as the ladder before would have had it.

    gain: the difference, each position counted by its phase's weight, as the proposal's gain is.
    num_steps: what all rest on.
    """

    padding: Padding
    padding_before: Padding
    gain: float
    num_steps: int


class AppliedProposal:
    """Follows one proposal from its order until another ladder serves. It looks when it is asked to, so what it
    measures begins with the first look after the swap."""

    def __init__(self, revision: int, proposal: LadderProposal, snapshot: EngineSnapshot) -> None:
        """snapshot: from before the order."""
        self.revision, self.proposal = revision, proposal
        self._before = _sizes(snapshot)
        self._demand_at_swap: dict[Phase, Demand] | None = None
        self._is_over = False

    def observe(self, snapshot: EngineSnapshot) -> RealisedGain | None:
        """What it brought up to now; None while it does not serve, not yet or not any more."""
        wanted = {Phase.PREFILL: self.proposal.prefill_tokens, Phase.DECODE: self.proposal.decode_rows}
        now, demand = _sizes(snapshot), _demand(snapshot)
        if now != wanted or self._is_over:
            self._is_over = self._demand_at_swap is not None
            return None
        if self._demand_at_swap is None:
            self._demand_at_swap = demand
        since = {phase: _minus(sizes, self._demand_at_swap[phase]) for phase, sizes in demand.items()}
        num_steps = int(sum(sum(sizes.values()) for sizes in since.values()))
        weights = self.proposal.weights
        weighed = {p: {n: c * weights[p] for n, c in sizes.items()} for p, sizes in since.items()}
        gain = padding_of(weighed, self._before).both - padding_of(weighed, now).both
        return RealisedGain(padding_of(since, now), padding_of(since, self._before), gain, num_steps)


def _bucket(name: str, phase: Phase, size: int) -> Bucket:
    """From a rung's name, `decode-8` or `prefill-512x16`."""
    rows = int(name.rpartition("x")[2]) if phase is Phase.PREFILL else size
    return Bucket(phase, size, rows)


def _seconds_per_position(snapshot: EngineSnapshot, phase: Phase) -> float | None:
    """Slope of the straight line through the times of the rungs that were used."""
    found = [(r.size, r.step_s) for r in snapshot.rungs if r.phase == phase and r.hits and r.step_s > 0]
    if len(found) < MIN_MEASURED:
        return None
    sizes, times = np.array(found).T
    away = sizes - sizes.mean()
    return float((away * times).sum() / (away**2).sum())


def _sizes(snapshot: EngineSnapshot) -> Sizes:
    return {p: tuple(sorted(r.size for r in snapshot.rungs if r.phase == p)) for p in Phase}


def _demand(snapshot: EngineSnapshot) -> dict[Phase, Demand]:
    return {phase: dict(snapshot.demand.get(phase, {})) for phase in Phase}


def _minus(now: Demand, then: Demand) -> dict[int, float]:
    return {size: count - then.get(size, 0) for size, count in now.items() if count > then.get(size, 0)}
