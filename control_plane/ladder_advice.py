"""What the demand of a serving engine says about its ladder, and what a change of the ladder brought. No HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config import EngineConfig
from runtime.engine.change import LadderState
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

MIN_GAIN = (
    0.005  # share of the positions; below it the next day's demand differs by more than the change brings
)

type Sizes = Mapping[Phase, tuple[int, ...]]


def propose(snapshot: EngineSnapshot, config: EngineConfig) -> LadderProposal:
    """The ladder for what was asked for since the start. Raises ValueError, with why, when there is none to propose."""
    return learn_ladder(snapshot.demand, config, rung_costs(snapshot))


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

    num_steps: what both rest on.
    """

    padding: Padding
    padding_before: Padding
    num_steps: int


class AppliedProposal:
    """Follows one proposal from its order on. It looks when it is asked to, so it counts from the first look after
    the swap."""

    def __init__(self, revision: int, proposal: LadderProposal, snapshot: EngineSnapshot) -> None:
        self.revision, self.proposal = revision, proposal
        self.before = _sizes(snapshot)
        self._number = snapshot.ladder_change.number
        self._demand_at_swap: dict[Phase, Demand] | None = None

    def state(self, snapshot: EngineSnapshot) -> str:
        """`compiling`, `serving`, `failed`, or `replaced` once another ladder serves."""
        wanted = {Phase.PREFILL: self.proposal.prefill_tokens, Phase.DECODE: self.proposal.decode_rows}
        if _sizes(snapshot) == wanted:
            return "serving"
        if self._demand_at_swap is not None:
            return "replaced"
        change = snapshot.ladder_change
        is_over = change.number > self._number and change.state is LadderState.FAILED
        return "failed" if is_over else "compiling"

    def observe(self, snapshot: EngineSnapshot) -> RealisedGain | None:
        """What it brought up to now; None while it does not serve."""
        if self.state(snapshot) != "serving":
            return None
        if self._demand_at_swap is None:
            self._demand_at_swap = _demand(snapshot)
        since = {p: _minus(sizes, self._demand_at_swap[p]) for p, sizes in _demand(snapshot).items()}
        largest = {p: min(self.before[p][-1], sizes[-1]) for p, sizes in _sizes(snapshot).items()}
        since = {p: {min(n, largest[p]): c for n, c in sizes.items()} for p, sizes in since.items()}
        num_steps = int(sum(sum(sizes.values()) for sizes in since.values()))
        return RealisedGain(padding_of(since, _sizes(snapshot)), padding_of(since, self.before), num_steps)


def _bucket(name: str, phase: Phase, size: int) -> Bucket:
    """From a rung's name, `decode-8` or `prefill-512x16`."""
    rows = int(name.rpartition("x")[2]) if phase is Phase.PREFILL else size
    return Bucket(phase, size, rows)


def _sizes(snapshot: EngineSnapshot) -> Sizes:
    return {p: tuple(sorted(r.size for r in snapshot.rungs if r.phase == p)) for p in Phase}


def _demand(snapshot: EngineSnapshot) -> dict[Phase, Demand]:
    return {phase: dict(snapshot.demand.get(phase, {})) for phase in Phase}


def _minus(now: Demand, then: Demand) -> dict[int, float]:
    return {size: count - then.get(size, 0) for size, count in now.items() if count > then.get(size, 0)}
