"""A ladder fitted to what was served: which rungs leave the least padding, for every number of rungs at once. No JAX.

`demand` counts steps by the positions they asked for: in prefill after each chunk was aligned to whole pages, in
decode rows. It depends on the largest rung and the page size, which bound a step, and hardly on the rungs between
(they change how long steps take, and so what waits at the next one): fitting those does not move what they are fitted to.
The largest rung is therefore never changed here.

The dynamic programme is that of optimal one-dimensional quantisation (Bruce 1965) with the error on one side: a size
goes to the next rung above it. Its optimum is exact over the candidates, and a rung that is no asked-for size could be
lowered to one, so no ladder of as many rungs pads less on the same demand: the optimum is the bound.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from runtime.config import EngineConfig
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder
from runtime.schedule.plan import Phase

MIN_STEPS = 1000  # of a phase: below it the count of an average size (1 in 32) is off by a fifth or more
SMOOTHING = 0.02  # share of the demand spread evenly over all sizes: no size is taken to be impossible
SMALL_PREFILL = 64  # positions; see `_forced`

type Demand = Mapping[int, float]  # positions asked for in one step -> steps


@dataclass(frozen=True, slots=True)
class RungCost:
    """What a compiled rung took: seconds to compile, scratch bytes."""

    compile_s: float
    temp_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PriceFactors:
    """Turn the cost of a rung into padded positions, as shares of all positions that the demand asked for.

    serve_s: how long the ladder will serve. Compiling takes its seconds from that on a CPU, where it shares the cores,
        and delays the swap elsewhere. A day, because traffic repeats by the day.
    share_per_gib: small, because one rung runs at a time and the allocator gives the same scratch to the next.
    """

    serve_s: float = 86_400.0
    share_per_gib: float = 1e-4

    def price(self, cost: RungCost, num_positions: float) -> float:
        share = cost.compile_s / self.serve_s + self.share_per_gib * cost.temp_bytes / 2**30
        return share * num_positions


@dataclass(frozen=True, slots=True)
class RungCurve:
    """The best rungs for each number of them. Index k: exactly k rungs; `costs` is infinite where that cannot be.

    costs: padded positions and prices; padding: padded positions alone.
    """

    costs: tuple[float, ...]
    padding: tuple[float, ...]
    rungs: tuple[tuple[int, ...], ...]

    def best(self, max_rungs: int) -> int:
        """The cheapest number of rungs up to max_rungs; the smaller among equals."""
        return int(np.argmin(self.costs[: max_rungs + 1]))


@dataclass(frozen=True, slots=True)
class Padding:
    """Padded positions over computed ones, by phase and together; 0 where nothing was computed."""

    prefill: float
    decode: float
    both: float


@dataclass(frozen=True, slots=True)
class LadderProposal:
    """A ladder that the demand asks for.

    padding_now, padding_predicted: on the demand, of the current and of the proposed rungs.
    lower_bound: what no ladder of ladder.max_rungs with the same largest rungs can beat on this demand.
    weighed_now, weighed_predicted: padding of both phases with each position counted by its phase's weight.
    num_sizes: rungs that would leave no padding at all: one for each size that was asked for.
    compile_s: expected seconds of compiling the added rungs, one after another.
    notes: what was held back and why.
    """

    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    padding_now: Padding
    padding_predicted: Padding
    lower_bound: Padding
    weighed_now: float
    weighed_predicted: float
    weights: Mapping[str, float]
    num_sizes: int
    rungs_to_add: tuple[str, ...]
    rungs_to_drop: tuple[str, ...]
    compile_s: float
    notes: tuple[str, ...]

    @property
    def is_change(self) -> bool:
        return bool(self.rungs_to_add or self.rungs_to_drop)

    @property
    def gain(self) -> float:
        """Share of the computed positions, weighed, that stops being padding."""
        return self.weighed_now - self.weighed_predicted


def best_rungs(
    demand: Demand,
    candidates: Collection[int],
    max_rungs: int,
    *,
    forced: Collection[int] = (),
    price: Callable[[int], float] = lambda size: 0.0,
) -> RungCurve:
    """Exact optimum over sets of candidates that hold the largest one and all `forced` ones.

    Minimises sum(weight * (rung - size)) + sum(price(rung)) where a size goes to the first rung that covers it.
    Takes O(max_rungs * C^2) for C candidates, vectorised over one C. Raises ValueError for a size above the largest
    candidate or a forced size that is no candidate.
    """
    sizes = np.array(sorted(set(candidates)), np.float64)
    index_of = {int(size): i for i, size in enumerate(sizes)}
    if not index_of or max(demand, default=0) > sizes[-1]:
        raise ValueError(f"steps asked for {max(demand, default=0)} positions, the largest candidate is "
                         f"{max(index_of, default=0)}")  # fmt: skip
    if missing := set(forced) - index_of.keys():
        raise ValueError(f"forced sizes {sorted(missing)} are not among the candidates")
    weight, mass = _cumulated(demand, sizes)
    prices = np.array([price(int(size)) for size in sizes])
    firsts = _first_predecessors({index_of[size] for size in forced}, len(sizes))

    # costs[j]: cheapest k rungs that cover sizes[:j], the largest of them sizes[j - 1]; parents say which was before.
    costs = np.full(len(sizes) + 1, np.inf)
    costs[0] = 0.0
    totals, parents = [float("inf")], []
    for _ in range(min(max_rungs, len(sizes))):
        new, parent = np.full_like(costs, np.inf), np.zeros(len(costs), np.int64)
        for j in range(1, len(costs)):
            size, i = sizes[j - 1], slice(firsts[j], j)
            tails = costs[i] + size * (weight[j] - weight[i]) - (mass[j] - mass[i])
            k = int(np.argmin(tails))
            new[j], parent[j] = tails[k] + prices[j - 1], firsts[j] + k
        costs = new
        totals.append(float(costs[-1]))
        parents.append(parent)
    rungs = tuple(
        _backtrack(parents[:k], sizes) if np.isfinite(totals[k]) else () for k in range(len(totals))
    )
    padding = tuple(padded(demand, r) if r else float("inf") for r in rungs)
    return RungCurve(tuple(totals), padding, rungs)


def split_rungs(prefill: RungCurve, decode: RungCurve, max_rungs: int) -> tuple[int, int]:
    """How many rungs each phase gets, together at most max_rungs, so that the sum of costs is least.

    Raises ValueError when max_rungs is too few for what is forced.
    """
    splits = [
        (p, d) for p in range(len(prefill.costs)) for d in range(len(decode.costs)) if p + d <= max_rungs
    ]
    p, d = min(splits, key=lambda s: (prefill.costs[s[0]] + decode.costs[s[1]], sum(s)))
    if not np.isfinite(prefill.costs[p] + decode.costs[d]):
        raise ValueError(f"ladder.max_rungs is {max_rungs}: too few for the rungs that must stay")
    return p, d


def learn_ladder(
    demand: Mapping[str, Demand],
    config: EngineConfig,
    rungs: Mapping[Bucket, RungCost],
    factors: PriceFactors | None = None,
    weights: Mapping[Phase, float] | None = None,
) -> LadderProposal:
    """The proposal for a demand by phase, given the rungs in force.

    Of rungs that are compiled already only the memory counts. A phase with fewer than MIN_STEPS steps keeps its rungs.
    weights: what a padded position of each phase costs, in any one unit, where that is not the same: on a CPU a decode
    row takes several times as long as a prefill position. It decides how the phases share the rungs.

    Raises ValueError when a phase has no rung in force or ladder.max_rungs is too small for the rungs that must stay.
    """
    now = {phase: tuple(sorted(b.tokens for b in rungs if b.phase is phase)) for phase in Phase}
    for phase, sizes in now.items():
        if not sizes:
            raise ValueError(f"no {phase} rung in force")
    max_rungs = config.ladder.max_rungs
    asked = {phase: _clipped(demand.get(phase, {}), now[phase][-1]) for phase in Phase}
    weight = weights or dict.fromkeys(Phase, 1.0)
    weighed = {p: {size: steps * weight[p] for size, steps in asked[p].items()} for p in Phase}
    total = sum(size * steps for sizes in weighed.values() for size, steps in sizes.items())
    price = partial((factors or PriceFactors()).price, num_positions=total)
    num_steps = {phase: sum(asked[phase].values()) for phase in Phase}
    curves = {
        phase: _learned(phase, weighed[phase], config, rungs, price)
        if num_steps[phase] >= MIN_STEPS
        else _fixed(now[phase], weighed[phase])
        for phase in Phase
    }
    bounds = {p: best_rungs(asked[p], {*asked[p], now[p][-1]}, max_rungs) for p in Phase}
    chosen = _share_rungs(curves, max_rungs)
    ladder = _ladder(config, chosen)
    add, drop = (sorted(s) for s in (set(ladder.rungs) - rungs.keys(), rungs.keys() - set(ladder.rungs)))
    return LadderProposal(
        prefill_tokens=chosen[Phase.PREFILL],
        decode_rows=chosen[Phase.DECODE],
        padding_now=padding_of(asked, now),
        padding_predicted=padding_of(asked, chosen),
        lower_bound=padding_of(asked, _share_rungs(bounds, max_rungs)),
        weighed_now=padding_of(weighed, now).both,
        weighed_predicted=padding_of(weighed, chosen).both,
        weights={str(phase): weight[phase] for phase in Phase},
        num_sizes=sum(len(sizes) for sizes in asked.values()),
        rungs_to_add=tuple(b.name for b in add),
        rungs_to_drop=tuple(b.name for b in drop),
        compile_s=sum(_nearest(b.phase, b.tokens, rungs).compile_s for b in add),
        notes=tuple(
            f"{phase}: {num_steps[phase]:.0f} steps seen, {MIN_STEPS} needed to learn; its rungs stay"
            for phase in Phase
            if num_steps[phase] < MIN_STEPS
        ),
    )


def padding_of(demand: Mapping[Phase, Demand], rungs: Mapping[Phase, Collection[int]]) -> Padding:
    """Shares of padding that a ladder leaves on a demand."""
    extra = {phase: padded(sizes, rungs[phase]) for phase, sizes in demand.items()}
    real = {phase: sum(size * steps for size, steps in sizes.items()) for phase, sizes in demand.items()}

    def share(*phases: Phase) -> float:
        computed = sum(extra.get(p, 0.0) + real.get(p, 0.0) for p in phases)
        return sum(extra.get(p, 0.0) for p in phases) / computed if computed else 0.0

    return Padding(share(Phase.PREFILL), share(Phase.DECODE), share(*Phase))


def padded(demand: Demand, rungs: Collection[int]) -> float:
    """Positions computed beyond what was asked for. Raises ValueError for a size that no rung covers."""
    sorted_rungs = np.array(sorted(rungs))
    sizes = np.array([*demand], np.int64)
    where = np.searchsorted(sorted_rungs, sizes)
    if len(sizes) and where.max() == len(sorted_rungs):
        raise ValueError(f"no rung covers {sizes.max()} positions; the largest has {sorted_rungs[-1]}")
    return float(np.sum((sorted_rungs[where] - sizes) * np.array([*demand.values()]))) if len(sizes) else 0.0


def smoothed(demand: Demand, grid: Collection[int], share: float = SMOOTHING) -> dict[int, float]:
    """The same number of steps, `share` of them spread evenly over the grid."""
    extra = share * sum(demand.values()) / len(grid)
    return {size: (1 - share) * demand.get(size, 0.0) + extra * (size in grid) for size in {*demand, *grid}}


def _clipped(demand: Demand, largest: int) -> dict[int, float]:
    """Sizes asked for under a larger ladder count as the largest: such steps are cut to it now."""
    clipped: dict[int, float] = {}
    for size, steps in demand.items():
        clipped[min(size, largest)] = clipped.get(min(size, largest), 0.0) + steps
    return clipped


def _learned(
    phase: Phase,
    demand: Demand,
    config: EngineConfig,
    rungs: Mapping[Bucket, RungCost],
    price: Callable[[RungCost], float],
) -> RungCurve:
    sizes = {b.tokens for b in rungs if b.phase is phase}
    step = config.kv_cache.page_size if phase is Phase.PREFILL else 1
    grid = range(step, max(sizes) + 1, step)
    return best_rungs(
        smoothed(demand, grid),
        {*grid, *sizes},
        config.ladder.max_rungs,
        forced=_forced(phase, grid, max(sizes)),
        price=_price(phase, rungs, price),
    )


def _share_rungs(curves: Mapping[Phase, RungCurve], max_rungs: int) -> dict[Phase, tuple[int, ...]]:
    prefill, decode = curves[Phase.PREFILL], curves[Phase.DECODE]
    num_prefill, num_decode = split_rungs(prefill, decode, max_rungs)
    return {Phase.PREFILL: prefill.rungs[num_prefill], Phase.DECODE: decode.rungs[num_decode]}


def _forced(phase: Phase, grid: range, largest: int) -> set[int]:
    """Rungs that stay whatever was seen: demand of a busy day says nothing of a quiet night.

    One decode row: a lone user would otherwise pay for the next rung at each token. A prefill rung of SMALL_PREFILL
    positions: the server gets ready on it, and a lone short prompt costs at most that many.
    """
    if phase is Phase.DECODE:
        return {1}
    return {next((size for size in grid if size >= SMALL_PREFILL), largest)}


def _price(
    phase: Phase, rungs: Mapping[Bucket, RungCost], price: Callable[[RungCost], float]
) -> Callable[[int], float]:
    """By size; what is compiled already costs its memory only."""
    compiled = {b.tokens for b in rungs if b.phase is phase}

    def of_size(size: int) -> float:
        cost = _nearest(phase, size, rungs)
        return price(replace(cost, compile_s=0.0) if size in compiled else cost)

    return of_size


def _nearest(phase: Phase, size: int, rungs: Mapping[Bucket, RungCost]) -> RungCost:
    """The cost of the rung in force that is next in size."""
    return rungs[min((b for b in rungs if b.phase is phase), key=lambda b: (abs(b.tokens - size), b.tokens))]


def _fixed(sizes: tuple[int, ...], demand: Demand) -> RungCurve:
    """A curve with one choice: the rungs as they are, which cost nothing more."""
    none = (float("inf"),) * len(sizes)
    extra = padded(demand, sizes)
    return RungCurve((*none, extra), (*none, extra), (*((),) * len(sizes), sizes))


def _ladder(config: EngineConfig, chosen: Mapping[Phase, tuple[int, ...]]) -> BucketLadder:
    lists = {"prefill_tokens": chosen[Phase.PREFILL], "decode_rows": chosen[Phase.DECODE]}
    changed = config.model_copy(update={"ladder": config.ladder.model_copy(update=lists)})
    return BucketLadder.from_config(changed, max_context=1)  # the context bounds rungs by rule only


def _cumulated(demand: Demand, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and positions they asked for, of everything that fits the first i sizes; both [C + 1]."""
    asked = np.array([*demand], np.float64)
    steps = np.array([*demand.values()], np.float64)
    where = np.searchsorted(sizes, asked)
    counts = (
        np.bincount(where, w, len(sizes)) if len(asked) else np.zeros(len(sizes))
        for w in (steps, steps * asked)
    )
    weight, mass = (np.concatenate([[0.0], np.cumsum(c)]) for c in counts)
    return weight, mass


def _first_predecessors(forced: set[int], num_sizes: int) -> list[int]:
    """For each state j the first state that may come before it: none that would skip a forced size."""
    firsts = [0]
    for j in range(1, num_sizes + 1):
        firsts.append(j - 1 if j - 2 in forced else firsts[-1])
    return firsts


def _backtrack(parents: list[np.ndarray], sizes: np.ndarray) -> tuple[int, ...]:
    chosen, j = [], len(sizes)
    for parent in reversed(parents):
        chosen.append(int(sizes[j - 1]))
        j = int(parent[j])
    return tuple(reversed(chosen))
