"""Known troubles of a serving engine: symptom, evidence and the change that helps. Pure rules over snapshots. No HTTP.

A rule sees a window of snapshots and the configuration that is in force.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from control_plane.finding import Evidence, Finding, Patch, Severity, Window, only_what_helps
from control_plane.ladder_advice import MIN_GAIN, ladder_patch, propose
from runtime.config import EngineConfig
from runtime.engine.change import LadderState
from runtime.engine.expert_status import ExpertStatus
from runtime.engine.stats import EngineSnapshot, Histogram

BUSY = 0.9  # the published signs of imbalance: some above 90 % busy
IDLE_SHARE = 0.5  # and others below half of the busiest
MIN_TOKENS_PER_EXPERT = 100  # fewer are uneven by chance: one standard deviation is a tenth
BALANCE_STEP = 0.1  # a fifth of the range at a time: copies share rows less equally, no text changes
MOST_BALANCE, MOST_MOVES = 0.5, 1024  # the fields' bounds
PAGES_FULL = 0.95  # the next long prompt preempts somebody
BATCH_CUT = 0.75  # rows, and about the pages they hold, that stay
SWING_S = 0.2  # the published sign: p99 moves by more than 200 ms
REQUESTS_PER_P99 = 100  # fewer have no 99th percentile but their maximum
SHORTEST_ADJUST_S = 0.03  # a decision needs a few steps to look at
RUNG_WASTE = 0.2  # what the rule for rungs promises at most, from 16 rows or pages on
MIN_HITS = 100  # launches of one rung: fewer cost nothing worth a compile
WASTE_OF_ALL = 0.01  # share of all positions that one rung must lose
SPARE = 0.5  # device time unused, with requests that wait: it is not the device they wait for
WAIT_OF_WINDOW = 0.5  # a request comes on average in the middle of the window that holds it
SHORTEST_WINDOW_S = 0.001
FULL_ROWS = 0.95  # rows in use; one or two are always between two requests


def diagnose(window: Window, config: EngineConfig) -> tuple[Finding, ...]:
    """Everything that is found, the most severe first. `config` is what is in force."""
    found = [only_what_helps(finding, config) for rule in RULES for finding in rule(window, config)]
    order = list(Severity)
    return tuple(sorted(found, key=lambda f: (order.index(f.severity), f.id)))


def expert_imbalance(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """Some devices (on one device: experts) busy, others idle, in the layer that is most uneven."""
    num_devices = config.parallel.expert_parallel_size
    after, before = (_rows(snapshot, num_devices) for snapshot in (window.last, window.first))
    if after.ndim != 2 or after.size == 0:
        return
    tokens = after - before if before.shape == after.shape else after  # [L, E or devices]
    with_experts = np.flatnonzero(tokens.any(axis=1))  # dense layers are rows of zeros
    tokens = tokens[with_experts]
    if not len(tokens) or tokens.shape[1] < 2:
        return
    if tokens.sum(axis=1).min() < MIN_TOKENS_PER_EXPERT * tokens.shape[1]:
        return
    share = tokens / tokens.max(axis=1, keepdims=True)  # of the busiest in the layer
    worst = int(share.min(axis=1).argmin())
    layer, least = int(with_experts[worst]), float(share[worst].min())
    if window.busy_share <= BUSY or least >= IDLE_SHARE:
        return
    what = "devices" if num_devices > 1 else "experts"
    patch, why_none = _against_imbalance(window, config)
    yield Finding(
        "expert_imbalance",
        "experts",
        Severity.WARNING if num_devices > 1 else Severity.INFO,
        f"In layer {layer} the busiest of the {what} was {100 * window.busy_share:.0f} % busy, the least loaded "
        f"{100 * window.busy_share * least:.0f} %.",
        {
            "layer": layer,
            "busiest_busy_share": window.busy_share,
            "least_of_busiest": least,
            f"num_{what}_below_half": int((share[worst] < IDLE_SHARE).sum()),
        },
        "the busiest device's load falls, and with it the time of a step",
        patch,
        why_none,
    )


def _rows(snapshot: EngineSnapshot, num_devices: int) -> np.ndarray:
    """Since the start: rows of each device [L, devices], on one device of each expert [L, E]."""
    if num_devices == 1:
        return np.array(snapshot.expert_tokens)
    return np.array(snapshot.experts.device_rows if snapshot.experts is not None else ())


def _against_imbalance(window: Window, config: EngineConfig) -> tuple[Patch | None, str]:
    """What helps, or why nothing that could be set does."""
    if config.parallel.expert_parallel_size == 1:
        return None, "all experts are on one device: there is nothing to move"
    experts, moves = window.last.experts, config.parallel.moves_per_step
    num_waiting = experts.waiting_moves if experts is not None else 0
    if num_waiting > 0 and moves < MOST_MOVES:
        return {"parallel": {"moves_per_step": min(MOST_MOVES, 2 * moves)}}, ""
    anew = "POST /admin/v1/experts/rebalance plans a whole placement anew"
    waits = f"{num_waiting} moves wait, at {moves} a step" if num_waiting else "no moves wait"
    if experts is not None and not _has_copies(experts):
        return None, (
            f"no expert has a copy to share its rows with, and {waits}: parallel.redundant_experts gives slots for copies "
            f"(at the next start); {anew}"
        )
    weight = config.batch_processing.expert_balance_weight
    if weight < MOST_BALANCE:
        raised = round(min(MOST_BALANCE, weight + BALANCE_STEP), 3)
        return {"batch_processing": {"expert_balance_weight": raised}}, ""
    return None, (
        f"copies level the devices as well as they can (expert_balance_weight is {MOST_BALANCE}) and {waits}: {anew}"
    )


def _has_copies(experts: ExpertStatus) -> bool:
    """Whether some layer has more slots than experts."""
    return any(len(set(layer)) < len(layer) for layer in experts.slot_experts)


def memory_pressure(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """Sequences lose their pages to others, or are about to."""
    preemptions = window.last.num_preemptions - window.first.num_preemptions
    used = max(_page_use(snapshot) for snapshot in window.series)
    if preemptions <= 0 and used <= PAGES_FULL:
        return
    rows = config.batch_processing.max_batch_size
    patch = _batch_patch(config, max(1, int(rows * BATCH_CUT))) if rows > 1 else None
    yield Finding(
        "memory_pressure",
        "kv_pages",
        Severity.CRITICAL if preemptions > 0 else Severity.WARNING,
        f"{preemptions} sequences were preempted; up to {100 * used:.0f} % of the KV pages were in use.",
        {
            "preemptions": preemptions,
            "max_page_use": used,
            "num_pages": window.last.num_pages,
            "max_batch_size": rows,
        },
        "fewer sequences share the pages, so none is computed twice; the queue gets longer. kv_cache.kv_cache_external "
        "would keep pages elsewhere: it is not built in this version",
        patch,
        "" if patch else "batch_processing.max_batch_size is 1 already",
    )


def latency_swing(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """p99 of whole requests moves between parts of the window. Only what the histogram's buckets prove counts."""
    spans = [_p99_bucket(counts, window.last.e2e_s.bounds) for counts in _parts(window)]
    if len(spans) < 2:
        return
    swing_s = max(low for low, _ in spans) - min(high for _, high in spans)
    if swing_s <= SWING_S:
        return
    batch = config.batch_processing
    patch = {
        "batch_processing": {
            "dynamic_adjust_window": _milliseconds(
                max(SHORTEST_ADJUST_S, batch.dynamic_adjust_window / 2), batch.dynamic_adjust_window
            ),
            "micro_batch_size": max(
                batch.micro_batch_size, min(2 * batch.micro_batch_size, batch.max_micro_batch_size)
            ),
            "smoothing": True,
        }
    }
    yield Finding(
        "latency_swing",
        "e2e_p99",
        Severity.WARNING,
        f"p99 of whole requests moved by at least {1e3 * swing_s:.0f} ms within {window.seconds:.0f} s.",
        {
            "swing_s": swing_s,
            "num_parts": len(spans),
            "lowest_p99_at_most_s": min(high for _, high in spans),
            "highest_p99_at_least_s": max(low for low, _ in spans),
        },
        "the batch size follows the load sooner and in smaller moves; prompts wait for fewer rounds",
        patch,
    )


def padding_waste(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """A rung that is used much and filled badly; one finding a phase, as one ladder mends all."""
    before = {rung.name: rung for rung in window.first.rungs}
    deltas: list[tuple[float, str, str, int, int]] = []
    computed_in_all = 0
    for rung in window.last.rungs:
        old = before.get(rung.name)
        hits = rung.hits - (old.hits if old else 0)
        real = rung.real_tokens - (old.real_tokens if old else 0)
        computed = rung.computed_tokens - (old.computed_tokens if old else 0)
        computed_in_all += max(0, computed)
        if hits >= MIN_HITS and computed > 0 and 1 - real / computed > RUNG_WASTE:
            deltas.append((1 - real / computed, rung.name, rung.phase, hits, computed - real))
    worst = {phase: (waste, name, hits, lost) for waste, name, phase, hits, lost in sorted(deltas)}
    for phase, (waste, name, hits, lost) in worst.items():
        if lost <= WASTE_OF_ALL * computed_in_all:
            continue
        patch, why, effect = _learned_patch(window.last, config)
        yield Finding(
            "padding_waste",
            phase,
            Severity.WARNING,
            f"Rung {name} computed {100 * waste:.0f} % padding in {hits} launches.",
            {"rung": name, "padding": waste, "hits": hits, "padded_positions": lost},
            effect,
            patch,
            why,
        )


def window_too_long(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """Requests wait for the batching window to close while the device has time."""
    waits = _since(window.first.queue_s, window.last.queue_s)
    num = sum(waits)
    held_s = window.last.policy.batch_window_s
    if num == 0 or held_s <= 0 or window.busy_share > 1 - SPARE:
        return
    mean_s = (window.last.queue_s.total - window.first.queue_s.total) / num
    if mean_s < WAIT_OF_WINDOW * held_s:
        return
    now_s = config.batch_processing.dynamic_batch_window
    patch = {
        "batch_processing": {
            "dynamic_batch_window": _milliseconds(max(SHORTEST_WINDOW_S, min(now_s, held_s) / 2), now_s)
        }
    }
    yield Finding(
        "window_too_long",
        "dynamic_batch_window",
        Severity.WARNING,
        f"Requests waited {1e3 * mean_s:.0f} ms for a batching window of {1e3 * held_s:.0f} ms while the device was "
        f"{100 * window.busy_share:.0f} % busy.",
        {
            "mean_queue_s": mean_s,
            "batch_window_s": held_s,
            "busy_share": window.busy_share,
            "num_requests": num,
        },
        "requests start sooner; prefill steps hold fewer of them",
        patch,
    )


def rung_missing(window: Window, config: EngineConfig) -> Iterator[Finding]:
    """A rung that does not serve, or rows that all the rungs together do not have."""
    last = window.last
    if last.ladder_change.state is LadderState.FAILED:
        yield _without_patch(
            "the_ladder", Severity.WARNING,
            f"The last change of the ladder failed; the old one serves: {last.ladder_change.error[:200]}",
            {"change": last.ladder_change.number},
            "the rung that failed must be left out, or the cause of its error be removed",
        )  # fmt: skip
    is_compiling = last.ladder_change.state is LadderState.COMPILING
    for rung in last.rungs:
        if rung.state == "failed" or (rung.state == "absent" and not is_compiling):
            largest = max(r.size for r in last.rungs if r.phase == rung.phase)
            severity = Severity.CRITICAL if rung.size == largest else Severity.WARNING
            effect = (
                "steps are cut to smaller rungs" if rung.size == largest else "the next larger rung pads more"
            )
            yield _without_patch(
                rung.name, severity, f"Rung {rung.name} is {rung.state}: {effect}. {rung.error[:200]}".strip(),
                {"size": rung.size}, "a compile that failed fails again until its cause is removed",
            )  # fmt: skip
    yield from _too_few_rows(window, config)


def _too_few_rows(window: Window, config: EngineConfig) -> Iterator[Finding]:
    ready = [r.size for r in window.last.rungs if r.phase == "decode" and r.state == "ready"]
    if not ready or any(s.num_waiting == 0 or s.num_running < FULL_ROWS * max(ready) for s in window.series):
        return
    if max(_page_use(snapshot) for snapshot in window.series) > PAGES_FULL:
        return  # more rows would not have pages
    rows = config.batch_processing.max_batch_size
    slots = config.ladder.row_slots or rows
    wanted = rows if max(ready) < rows else min(slots, 2 * rows)
    patch = _batch_patch(config, wanted) if wanted > max(ready) else None
    yield Finding(
        "rung_missing",
        "decode_rows",
        Severity.WARNING,
        f"All {max(ready)} rows of the largest decode rung were in use and {window.last.num_waiting} requests waited.",
        {
            "largest_ready_rows": max(ready),
            "max_batch_size": rows,
            "row_slots": slots,
            "num_waiting": window.last.num_waiting,
            "max_page_use": max(_page_use(snapshot) for snapshot in window.series),
        },
        "more requests decode together: more tokens a second, each somewhat slower",
        patch,
        ""
        if patch
        else f"the device has room for {slots} rows until ladder.row_slots is raised and the server restarted",
    )


def _without_patch(subject: str, severity: Severity, symptom: str, evidence: Evidence, why: str) -> Finding:
    return Finding("rung_missing", subject, severity, symptom, evidence, "none", None, why)


def _learned_patch(snapshot: EngineSnapshot, config: EngineConfig) -> tuple[Patch | None, str, str]:
    """Patch or None, why not, and what it would bring."""
    effect = "fewer positions are computed for nothing"
    try:
        proposal = propose(snapshot, config)
    except ValueError as error:
        return None, str(error), effect
    now, then, bound = (
        100 * p.both for p in (proposal.padding_now, proposal.padding_predicted, proposal.lower_bound)
    )
    if proposal.gain < MIN_GAIN:
        why = f"no ladder of {config.ladder.max_rungs} rungs mends it: {now:.1f} % up to the rung would become {then:.1f} %"
        return (
            None,
            "; ".join((why, *proposal.notes, "what remains is page alignment and ended rows")),
            effect,
        )
    effect = (
        f"padding up to the rung falls from {now:.1f} to {then:.1f} % (no ladder gets below {bound:.1f} %)"
    )
    return ladder_patch(proposal), "", effect


def _batch_patch(config: EngineConfig, rows: int) -> Patch:
    """max_batch_size, and an explicit list of rungs that ends there."""
    patch: Patch = {"batch_processing": {"max_batch_size": rows}}
    if config.ladder.decode_rows:
        smaller = [r for r in config.ladder.decode_rows if r < rows]
        patch["ladder"] = {"decode_rows": [*smaller, rows]}
    return patch


def _milliseconds(seconds: float, now_s: float) -> str:
    """Never longer than what is in force."""
    return f"{1e3 * min(seconds, now_s):g}ms"


def _page_use(snapshot: EngineSnapshot) -> float:
    """Pages that running sequences hold; those kept for a prefix that may come again are free."""
    return snapshot.used_pages / snapshot.num_pages if snapshot.num_pages else 0.0


def _since(before: Histogram, after: Histogram) -> list[int]:
    return [b - a for a, b in zip(before.counts, after.counts, strict=True)]


def _parts(window: Window) -> Iterator[list[int]]:
    """Counts of e2e_s in consecutive parts of the window with enough requests each; the rest is left out."""
    start = window.first
    for snapshot in window.series[1:]:
        counts = _since(start.e2e_s, snapshot.e2e_s)
        if sum(counts) >= REQUESTS_PER_P99:
            yield counts
            start = snapshot


def _p99_bucket(counts: Sequence[int], bounds: Sequence[float]) -> tuple[float, float]:
    """The bounds between which the 99th percentile lies; nothing is guessed within the bucket."""
    edges = (0.0, *bounds, float("inf"))
    index = int(np.searchsorted(np.cumsum(counts), 0.99 * sum(counts)))
    return edges[index], edges[index + 1]


RULES: tuple[Callable[[Window, EngineConfig], Iterator[Finding]], ...] = (
    expert_imbalance,
    memory_pressure,
    latency_swing,
    padding_waste,
    window_too_long,
    rung_missing,
)
