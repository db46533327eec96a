"""Measures each rung on a running engine, for the virtual clock and for the promises that a machine can keep.

Decode: as many equal requests as the rung has rows, with one step a launch and with the most; a stream's gaps are
then the times of launches (the better of two medians), and two points make a line. Prefill: prompts that fill a rung,
one at a time.
"""

import statistics
from collections.abc import Callable

from runtime.bench.adaptive_modes import changed
from runtime.bench.adaptive_traffic import Lengths
from runtime.bench.client import RequestTimes
from runtime.bench.replay import Played
from runtime.bench.running import RunningEngine
from runtime.bench.serving_metrics import rung_use
from runtime.bench.virtual import StepTimes
from runtime.bench.workload import greedy_request, random_prompts
from runtime.config import EngineConfig, SloConfig
from runtime.ladder.ladder import BucketLadder
from runtime.request import Request
from runtime.schedule.plan import Phase

ITL_FACTOR = (
    5.0  # Sarathi-Serve (Agrawal and others, OSDI 2024): the strict promise is 5 x an undisturbed decode step
)
TTFT_FACTOR = 10.0  # an undisturbed prefill of a long prompt, and nine more like it in front
LONG_PROMPT = 0.9  # quantile of the prompt lengths
SLO_TEXT = (
    f"itl = {ITL_FACTOR:g} x one undisturbed decode step of the largest rung; ttft = {TTFT_FACTOR:g} x the undisturbed "
    f"prefill of a prompt at the {100 * LONG_PROMPT:g} % quantile"
)
_NUM_LAUNCHES = 8  # measured for each point
_NUM_PREFILLS = 5
_UNBOUND_S = "1000s"  # a promise that no step breaks, so that launches are as long as they are told to be
_TIMEOUT_S = 60.0


def measure_step_times(
    engine: RunningEngine,
    config: EngineConfig,
    ladder: BucketLadder,
    lengths: Lengths,
    on_rung: Callable[[], None] = lambda: None,
) -> StepTimes:
    """StepTimes of every rung; leaves the engine with all rungs and the configuration of the last measurement."""
    context = int(lengths.mean_context)
    most = config.ladder.max_decode_steps
    launches: dict[int, dict[int, float]] = {bucket.rows: {} for bucket in ladder.decode}
    for num_steps in {1, most}:
        settings = {
            "batch_processing.enable_dynamic_batch": False,
            "batch_processing.base_batch_size": ladder.decode[-1].rows,
            "ladder.max_decode_steps": num_steps,
            "slo.itl": _UNBOUND_S,
        }
        engine.loop.configure(changed(config, settings)).result(_TIMEOUT_S)
        for bucket in [*ladder.decode, *reversed(ladder.decode)]:  # twice, some time apart
            engine.loop.restrict_rungs(bucket.rows)
            found = _launch_s(engine, bucket.rows, num_steps, context)
            best = launches[bucket.rows]
            best[num_steps] = min(found, best.get(num_steps, found))  # what disturbs only ever adds
            on_rung()
    engine.loop.restrict_rungs(None)
    prefill: dict[int, float] = {}
    for bucket in ladder.prefill:
        prompt_len = min(bucket.tokens, engine.max_context - 1)
        for i, prompt in enumerate(
            random_prompts(_NUM_PREFILLS, prompt_len, engine.shape.vocab_size, seed=11)
        ):
            _generate(engine, [greedy_request(f"prefill-{bucket.tokens}-{i}", prompt, 1)])
        on_rung()
    snapshot = engine.fresh_snapshot()
    for rung in snapshot.rungs:
        if rung.phase == Phase.PREFILL.value:
            prefill[rung.size] = rung.step_s
    host = snapshot.host_step_s
    decode = {rows: _line(found, most) for rows, found in launches.items()}
    return StepTimes(decode, prefill, host.total / max(1, host.count))


def scaled_to_run(times: StepTimes, played: Played) -> StepTimes:
    """All times by the one factor with which they add up to what the device was busy in a run of mixed steps.

    Rungs are measured alone with equal requests; a mix has longer contexts and a busier host beside it.
    """
    sizes = {rung.name: rung.size for rung in played.after.rungs}
    modelled_s = 0.0
    for rung in rung_use(played):
        if not rung["hits"]:
            continue
        size = sizes[rung["name"]]
        if rung["phase"] == Phase.PREFILL.value:
            modelled_s += rung["hits"] * times.prefill[size]
        else:
            launch_s, step_s = times.decode[size]
            modelled_s += rung["hits"] * launch_s + rung["computed_tokens"] / size * step_s
    factor = (played.after.busy_s - played.before.busy_s) / modelled_s
    return StepTimes(
        {rows: (a * factor, b * factor) for rows, (a, b) in times.decode.items()},
        {tokens: s * factor for tokens, s in times.prefill.items()},
        times.host_s,
    )


def ceiling_tok_s(times: StepTimes, lengths: Lengths) -> float:
    """Output tokens/s if every step of both phases were full, on the rung that is cheapest by the token.

    No way of forming batches can pass it: prompts cost the same in all of them, and only the rest is to be gained.
    """
    prefill_s = min(seconds / tokens for tokens, seconds in times.prefill.items())
    decode_s = min(step_s / rows for rows, (_, step_s) in times.decode.items())
    num_prompt, num_output = sum(lengths.prompt), sum(lengths.output)
    return num_output / (num_prompt * prefill_s + num_output * decode_s)


def slo_of(times: StepTimes, ladder: BucketLadder, lengths: Lengths) -> SloConfig:
    """Promises for this machine by the rule SLO_TEXT, to whole milliseconds."""
    long_prompt = lengths.quantile_prompt(LONG_PROMPT)
    largest = ladder.prefill[-1].tokens
    prefill_s = times.prefill[largest] * (long_prompt // largest)
    rest = long_prompt % largest
    prefill_s += times.prefill[next(b.tokens for b in ladder.prefill if b.tokens >= rest)] if rest else 0.0
    itl_s = ITL_FACTOR * times.decode_step_s(ladder.decode[-1].rows)
    promises = {"ttft": _whole_ms(TTFT_FACTOR * prefill_s), "itl": _whole_ms(itl_s)}
    return SloConfig.model_validate(promises)


def _launch_s(engine: RunningEngine, rows: int, num_steps: int, context: int) -> float:
    """Median seconds of a decode launch of num_steps steps in which all rows take part."""
    num_new = 1 + num_steps * (_NUM_LAUNCHES + 4)
    prompt_len = max(1, min(context - num_new // 2, engine.max_context - num_new))
    prompts = random_prompts(rows, prompt_len, engine.shape.vocab_size, seed=rows)
    requests = [greedy_request(f"decode-{rows}-{num_steps}-{i}", p, num_new) for i, p in enumerate(prompts)]
    times = _generate(engine, requests)
    last = max(times, key=lambda t: t.event_s[0])  # all others have their first token by then
    first_end_s = min(t.event_s[-1] for t in times)
    gaps = [
        (gap, end_s)
        for gap, end_s, num in zip(last.gaps_s, last.event_s[1:], last.event_tokens[1:], strict=True)
        if num == num_steps and end_s <= first_end_s
    ]
    return statistics.median([gap for gap, _ in gaps] or last.gaps_s)


def _line(launch_s: dict[int, float], most: int) -> tuple[float, float]:
    """(seconds apart from the steps, seconds of a step) through the two points; neither below zero."""
    if most == 1:
        return 0.0, launch_s[1]
    step_s = max(0.0, (launch_s[most] - launch_s[1]) / (most - 1))
    return max(0.0, launch_s[1] - step_s), min(step_s, launch_s[most] / most)


def _generate(engine: RunningEngine, requests: list[Request]) -> list[RequestTimes]:
    engine.client.submit(requests)
    engine.client.wait(timeout_s=_TIMEOUT_S)
    times = list(engine.client.take().values())
    failed = [t.error for t in times if not t.is_ok]
    if failed:
        raise RuntimeError(f"a request of the calibration failed: {failed[0]}")
    return times


def _whole_ms(seconds: float) -> str:
    return f"{max(1, round(1e3 * seconds))}ms"
