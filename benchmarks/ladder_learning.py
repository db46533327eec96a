"""Padding of learned ladders against plain ones, on recorded traces; no model and no JAX, the real scheduler.

    python benchmarks/ladder_learning.py TRACE TRACE TRACE [--requests N] [--json FILE]

Each trace is cut into two halves by time. The first is learned from, the second judges: the ladder learned from its
own trace's first half, those learned from the other traces', and plain rules. Requests come open loop at 80 % of the
capacity that a closed loop over all requests shows. Time is virtual: a launch takes what a straight line through
times measured with the embedded model on two CPU cores says, for the rung of the default ladder that covers it, and
host time is nothing. So demand is that of the default ladder; the column "realised" plays the second half again under
the learned one. The largest rungs and the page size bound a step, the rungs between only change how long it takes.

Three kinds of positions are computed and not asked for; a ladder can only spare the first: up to the rung, up to the
page (a chunk starts on one), and row-steps of a decode launch after a row's last token. `both` has the first alone
over all computed positions, `with page and burst` has all three. `time` is the share of the device's time that goes
into the first kind, by the straight lines: a decode row takes as long as six prefill positions. "by time" ladders
weigh the phases so, as the server does once it has measured both; the others count positions alike.
"""

import argparse
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.bench.report import machine_stamp, percentile, print_table, write_json
from runtime.bench.traces import BLOCK_LEN, TraceRequest, fitting_factor, read_trace, scale_lengths
from runtime.bench.workload import block_prompt, greedy_request, random_prompts
from runtime.config import EngineConfig, parse_config
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.learned import (
    SMOOTHING,
    LadderProposal,
    Padding,
    RungCost,
    learn_ladder,
    padded,
    padding_of,
)
from runtime.request import Request
from runtime.schedule.plan import Phase, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import limit_burst
from runtime.schedule.scheduler import Scheduler

MAX_CONTEXT, VOCAB_SIZE = 2048, 4096  # of the embedded model
CONFIG = parse_config({})  # pages of 16, 32 rows, 512 prefill tokens, 24 rungs
LONGEST_LEFT_OUT = 0.05  # share of a trace's requests: one factor for all lengths would make the rest tiny
LOAD = 0.8
PIPELINE_DEPTH = 2
COMPILE_S = 5.5  # of one rung: 24 took 66 s on two threads, in the file named below
# Seconds of a prefill step, and of one decode step, from benchmarks/results/trace_azure_demo.json.
PREFILL_S = (0.002, 0.055e-3)
DECODE_S = (0.0003, 0.35e-3)

LINES = {Phase.PREFILL: PREFILL_S, Phase.DECODE: DECODE_S}
BY_TIME = {phase: seconds for phase, (_, seconds) in LINES.items()}
BOUND_KEY = f"bound_with_{CONFIG.ladder.max_rungs}_rungs_percent"

LADDERS: dict[str, dict[Phase, Sequence[int]]] = {
    "powers of two": {Phase.PREFILL: (16, 32, 64, 128, 256, 512), Phase.DECODE: (1, 2, 4, 8, 16, 32)},
    "step 64": {Phase.PREFILL: range(64, 513, 64), Phase.DECODE: range(4, 33, 4)},
}


@dataclass(slots=True)
class Played:
    """What a run asked for: steps by positions, and the positions lost to pages and to ended rows."""

    demand: dict[Phase, Counter[int]] = field(default_factory=lambda: {phase: Counter() for phase in Phase})
    page_loss: int = 0
    burst_loss: int = 0
    real: int = 0
    duration_s: float = 0.0
    busy_s: float = 0.0
    num_preemptions: int = 0

    def add(self, plan: StepPlan, page: int) -> None:
        if plan.phase is Phase.PREFILL:
            aligned = sum(-(-c.num_tokens // page) * page for c in plan.chunks)
            self.demand[Phase.PREFILL][aligned] += 1
            self.page_loss += aligned - plan.num_tokens
            self.real += plan.num_tokens
        else:
            produced = sum(c.num_tokens for c in plan.chunks)
            steps = max(c.num_tokens for c in plan.chunks)
            self.demand[Phase.DECODE][len(plan.chunks)] += steps
            self.burst_loss += steps * len(plan.chunks) - produced
            self.real += produced

    def padding(self, rungs: Mapping[Phase, Sequence[int]]) -> tuple[Padding, float]:
        """Padding up to the rungs, and with what pages and bursts lose."""
        found = padding_of(self.demand, rungs)
        asked = self.real + self.page_loss + self.burst_loss
        return found, 1 - self.real * (1 - found.both) / asked

    def padded_time(self, rungs: Mapping[Phase, Sequence[int]]) -> float:
        """Share of the device's time that goes into padding up to the rungs."""
        extra_s = sum(LINES[p][1] * padded(self.demand[p], rungs[p]) for p in Phase)
        real_s = sum(
            steps * (LINES[p][0] + LINES[p][1] * size)
            for p in Phase
            for size, steps in self.demand[p].items()
        )
        return extra_s / (real_s + extra_s)


def play(requests: Sequence[Request], ladder: BucketLadder, config: EngineConfig = CONFIG) -> Played:
    """Serve requests by arrival time on a virtual clock, two launches deep as the engine does."""
    now, device_free, decode_step_s = 0.0, 0.0, 0.0
    burst = config.ladder.max_decode_steps
    rows, page = config.batch_processing.max_batch_size, config.kv_cache.page_size

    def limits() -> StepLimits:
        return StepLimits(ladder.prefill[-1].tokens, ladder.prefill[-1].rows, ladder.decode[-1].rows, burst)

    scheduler = Scheduler(
        page_size=page,
        num_pages=2 * rows * (MAX_CONTEXT // page) + 1,
        num_rows=rows,
        max_context=MAX_CONTEXT,
        enable_prefix_cache=config.kv_cache.enable_prefix_cache,
        limits=limits,
        clock=lambda: now,
    )
    played = Played()
    coming = deque(requests)
    flying: deque[tuple[StepPlan, float]] = deque()
    while coming or not scheduler.is_idle:
        while coming and coming[0].arrival_s <= now:
            scheduler.add(coming.popleft())
        plan = scheduler.schedule() if len(flying) < PIPELINE_DEPTH else None
        if plan is not None:
            played.add(plan, page)
            took_s, step_s = launch_s(plan, ladder, page)
            device_free = max(now, device_free) + took_s
            played.busy_s += took_s
            flying.append((plan, device_free))
            if plan.phase is Phase.DECODE:
                decode_step_s += (step_s - decode_step_s) * (0.1 if decode_step_s else 1.0)
                burst = limit_burst(config.ladder.max_decode_steps, decode_step_s, config.slo.itl)
        if flying and (plan is None or len(flying) == PIPELINE_DEPTH):
            done, ended_s = flying.popleft()
            now = max(now, ended_s)
            scheduler.collect(done, tokens_of(done))
        elif plan is None and coming:
            now = max(now, coming[0].arrival_s)
    played.duration_s, played.num_preemptions = now, scheduler.num_preemptions
    return played


def launch_s(plan: StepPlan, ladder: BucketLadder, page: int) -> tuple[float, float]:
    """Seconds of a launch, and of one step of it."""
    num_rows = len(plan.chunks)
    if plan.phase is Phase.PREFILL:
        aligned = sum(-(-c.num_tokens // page) * page for c in plan.chunks)
        rung = ladder.pick(Phase.PREFILL, aligned, num_rows, lambda _: True)
        step_s = PREFILL_S[0] + PREFILL_S[1] * rung.tokens
        return step_s, step_s
    rung = ladder.pick(Phase.DECODE, num_rows, num_rows, lambda _: True)
    step_s = DECODE_S[0] + DECODE_S[1] * rung.rows
    return step_s * max(c.num_tokens for c in plan.chunks), step_s


def tokens_of(plan: StepPlan) -> StepResult:
    """Every row yields all that it was asked for: lengths are known beforehand."""
    counts = (c.num_tokens if plan.phase is Phase.DECODE else int(c.samples) for c in plan.chunks)
    return StepResult(tuple((1,) * n for n in counts))


@dataclass(frozen=True, slots=True)
class Trace:
    """The first half of a trace to learn from and the second to judge by, at the same load."""

    name: str
    length_scale: float
    time_scale: float
    first: Played
    second: Played
    second_requests: tuple[Request, ...]


def read_halves(path: Path, num_requests: int, ladder: BucketLadder) -> Trace:
    found = read_trace(path, num_requests)
    limit = percentile([r.total_len for r in found], 100 * (1 - LONGEST_LEFT_OUT)) or 0
    found = [r for r in found if r.total_len <= limit]
    scale = fitting_factor(found, MAX_CONTEXT)
    scaled = scale_lengths(found, scale, MAX_CONTEXT)
    middle = (found[0].t_s + found[-1].t_s) / 2
    halves = [[r for r in scaled if r.t_s < middle], [r for r in scaled if r.t_s >= middle]]
    requests = [planned(half, scale, seed) for seed, half in enumerate(halves)]
    closed = play([replace(r, arrival_s=0.0) for half in requests for r in half], ladder)
    time_scale = closed.duration_s / LOAD / (found[-1].t_s - found[0].t_s)
    first, second = ([replace(r, arrival_s=r.arrival_s * time_scale) for r in half] for half in requests)
    name = path.name.partition(".")[0]
    return Trace(name, scale, time_scale, play(first, ladder), play(second, ladder), tuple(second))


def planned(requests: Sequence[TraceRequest], scale: float, seed: int) -> list[Request]:
    """Prompts that share what the trace says; times from 0."""
    block_len = max(1, int(BLOCK_LEN * scale))
    made = []
    for i, r in enumerate(requests):
        if r.block_ids:
            prompt = block_prompt(r.block_ids, block_len, r.prompt_len, VOCAB_SIZE, seed)
        else:
            prompt = random_prompts(1, r.prompt_len, VOCAB_SIZE, seed * 1_000_003 + i)[0]
        made.append(greedy_request(f"{seed}-{i}", prompt, r.output_len, r.t_s - requests[0].t_s))
    return made


def learned(
    played: Played, current: BucketLadder, max_rungs: int, weights: Mapping[Phase, float] | None = None
) -> LadderProposal:
    config = parse_config({"ladder": {"max_rungs": max_rungs}})
    costs: dict[Bucket, RungCost] = {bucket: RungCost(COMPILE_S) for bucket in current.rungs}
    return learn_ladder({str(p): d for p, d in played.demand.items()}, config, costs, weights=weights)


def rungs_of(proposal: LadderProposal) -> dict[Phase, Sequence[int]]:
    return {Phase.PREFILL: proposal.prefill_tokens, Phase.DECODE: proposal.decode_rows}


def judge(trace: Trace, others: Sequence[Trace], default: BucketLadder) -> dict[str, Any]:
    """Every ladder on the second half of `trace`; the foreign ones learned from the first halves of `others`."""
    sources = {"own first half": trace} | {other.name: other for other in others}
    max_rungs = CONFIG.ladder.max_rungs
    own = learned(trace.first, default, max_rungs)
    ladders: dict[str, Mapping[Phase, Sequence[int]]] = {
        f"learned: {name}": rungs_of(learned(source.first, default, max_rungs))
        for name, source in sources.items()
    }
    ladders |= {
        f"learned by time: {name}": rungs_of(learned(source.first, default, max_rungs, BY_TIME))
        for name, source in sources.items()
    }
    ladders |= {"default rule": {phase: [b.tokens for b in default.of(phase)] for phase in Phase}} | LADDERS
    for rungs in LADDERS.values():  # and with no more rungs than a plain rule has
        num_rungs = sum(map(len, rungs.values()))
        ladders |= {
            f"learned, {num_rungs} rungs: {name}": rungs_of(learned(source.first, default, num_rungs))
            for name, source in sources.items()
        }
    rows = {name: row(trace.second, rungs) for name, rungs in ladders.items()}
    rows["realised: own first half"] = row(play(trace.second_requests, ladder_of(own)), rungs_of(own))
    rows["bound: a rung for each size"] = row(
        trace.second, {p: sorted(d) for p, d in trace.second.demand.items()}
    )
    best = learned(trace.second, default, max_rungs).lower_bound  # fitted to what it is judged by
    return {
        "length_scale": round(trace.length_scale, 5),
        "time_scale": round(trace.time_scale, 5),
        "requests_judged": len(trace.second_requests),
        "busy_share": round(trace.second.busy_s / trace.second.duration_s, 3),
        "preemptions": trace.second.num_preemptions,
        "steps": {str(p): sum(d.values()) for p, d in trace.second.demand.items()},
        "prefill_steps_at_largest": trace.second.demand[Phase.PREFILL][default.prefill[-1].tokens],
        BOUND_KEY: percent(best.both),
        "ladders": rows,
    }


def row(played: Played, rungs: Mapping[Phase, Sequence[int]]) -> dict[str, Any]:
    padding, with_all = played.padding(rungs)
    return {
        "num_rungs": sum(map(len, rungs.values())),
        "prefill_percent": percent(padding.prefill),
        "decode_percent": percent(padding.decode),
        "both_percent": percent(padding.both),
        "with_page_and_burst_percent": percent(with_all),
        "time_percent": percent(played.padded_time(rungs)),
        "rungs": {str(phase): list(sizes) for phase, sizes in rungs.items()},
    }


def ladder_of(proposal: LadderProposal) -> BucketLadder:
    lists = {"prefill_tokens": proposal.prefill_tokens, "decode_rows": proposal.decode_rows}
    return BucketLadder.from_config(parse_config({"ladder": lists}), MAX_CONTEXT)


def percent(share: float) -> float:
    return round(100 * share, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, help="two traces or more")
    parser.add_argument("--requests", default=4000, type=int, help="of each trace, from its start")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(options.traces) < 2:
        parser.error("two traces are needed: one to learn from, another to judge by")
    default = BucketLadder.from_config(CONFIG, MAX_CONTEXT)
    traces = [read_halves(path, options.requests, default) for path in options.traces]
    result: dict[str, Any] = {
        "machine": machine_stamp(),
        "config": {
            "requests": options.requests, "load": LOAD, "max_context": MAX_CONTEXT,
            "longest_left_out": LONGEST_LEFT_OUT, "prefill_s": PREFILL_S, "decode_s": DECODE_S,
            "compile_s": COMPILE_S, "max_rungs": CONFIG.ladder.max_rungs, "smoothing": SMOOTHING,
        },
        "traces": {},
    }  # fmt: skip
    for trace in traces:
        found = judge(trace, [other for other in traces if other is not trace], default)
        result["traces"][trace.name] = found
        print_table(
            f"{trace.name}: padding in % of computed positions, judged on the second half; no ladder of "
            f"{CONFIG.ladder.max_rungs} rungs beats {found[BOUND_KEY]} % in `both`",
            ["ladder", "rungs", "prefill", "decode", "both", "with page and burst", "time"],
            [
                [name, r["num_rungs"], *(r[f"{k}_percent"] for k in COLUMNS)]
                for name, r in found["ladders"].items()
            ],
        )
    if options.json:
        write_json(options.json, result)


COLUMNS = ("prefill", "decode", "both", "with_page_and_burst", "time")

if __name__ == "__main__":
    main()
