"""Forecasts of the experts' load with and without traffic keys, for requests that run and wait in the real scheduler.

A simulation: the scheduler and the mix of traffic are the server's, launches take no time, and the experts that a task's tokens
go to are drawn from the recorded routing of that task, step after step. A placement is made from the forecast at the end of a
window and judged on the next one, as everywhere in `expert_replay.py`. Imports no JAX.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from runtime.bench.expert_loads import NUM_RECORDED_EXPERTS, STEP_TOKENS, RecordedLoads
from runtime.engine.traffic_mix import TrafficMix, tokens_by_key
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.load_predictor import LoadPredictor
from runtime.experts.shares import device_loads, imbalance
from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy
from runtime.schedule.scheduler import Scheduler

WINDOW_LAUNCHES = 16
ROWS, PREFILL_TOKENS, PAGE_SIZE = 64, 512, 16
PROMPT_LENS, OUTPUT_LENS = (64, 512), (16, 128)  # shortest and longest
LINE = 8  # requests that wait, while there are some
FORECASTS = ("last_window", "predicted", "predicted_with_keys")
WARM_WINDOWS = 8  # before the first that is judged


def replay_bursts(
    loads: RecordedLoads,
    num_devices: int,
    slots_per_device: int,
    burst: int,
    num_requests: int,
    num_seeds: int,
) -> dict[str, Any]:
    """`replay_traffic`, the mean of some seeds."""
    runs = [
        replay_traffic(loads, num_devices, slots_per_device, burst, num_requests, seed)
        for seed in range(num_seeds)
    ]
    means = {name: round(float(np.mean([run[name] for run in runs])), 4) for name in FORECASTS}
    judged = sum(run["judged_windows"] for run in runs)
    sizes = {"requests": num_requests, "seeds": num_seeds, "judged_windows": judged}
    return runs[0] | sizes | means


def replay_traffic(
    loads: RecordedLoads,
    num_devices: int,
    slots_per_device: int,
    burst: int,
    num_requests: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean imbalance of the judged windows by what the forecast knew. burst: requests of one task in a row."""
    rng = np.random.default_rng(seed)
    shape = SlotShape(NUM_RECORDED_EXPERTS, num_devices, slots_per_device)
    scheduler = _scheduler()
    mix = TrafficMix(scheduler.sequences.values)
    tasks = {task: itertools.cycle(steps) for task, steps in loads.steps.items()}
    launches = _launches(scheduler, _requests(rng, tuple(tasks), burst, num_requests))
    plain, keyed = (LoadPredictor(loads.num_layers, NUM_RECORDED_EXPERTS) for _ in range(2))
    forecasts: dict[str, np.ndarray] = {}
    found: dict[str, list[float]] = {}
    for number in itertools.count():
        window = np.zeros((loads.num_layers, NUM_RECORDED_EXPERTS), np.int64)
        for plan, result in itertools.islice(launches, WINDOW_LAUNCHES):
            mix.on_step(plan, result, plan.num_steps)
            window += _draw(rng, tasks, tokens_by_key(plan, result))
        if not window.any():
            break
        if number >= WARM_WINDOWS:
            for name, forecast in forecasts.items():
                by_device = device_loads(balance(forecast, shape), window.astype(float))
                found.setdefault(name, []).append(float(imbalance(by_device).mean()))
        seen, coming = mix.end_window()
        plain.observe(window)
        keyed.observe(window, seen)
        forecasts = {
            "last_window": window.astype(float),
            "predicted": plain.predict().loads,
            "predicted_with_keys": keyed.predict(coming).loads,
        }
    return {
        "devices": num_devices,
        "slots_per_device": slots_per_device,
        "requests_in_a_row": burst,
        "judged_windows": len(found["predicted"]),
        **{name: round(float(np.mean(values)), 4) for name, values in found.items()},
    }


def _draw(
    rng: np.random.Generator, tasks: Mapping[str, Iterator[np.ndarray]], tokens: Counter[str]
) -> np.ndarray:
    """Counts [L, E] of so many tokens of each task."""
    parts = []
    for task, number in tokens.items():
        step = next(tasks[task])
        top_k = int(step[0].sum()) // STEP_TOKENS
        parts.append(rng.multinomial(number * top_k, step / step.sum(axis=1, keepdims=True)))
    return np.stack(parts).sum(axis=0)


def _scheduler() -> Scheduler:
    limits = StepLimits(PREFILL_TOKENS, ROWS, ROWS, max_decode_steps=1)
    longest = PROMPT_LENS[1] + OUTPUT_LENS[1]
    return Scheduler(
        page_size=PAGE_SIZE,
        num_pages=1 + ROWS * longest // PAGE_SIZE,
        num_rows=ROWS,
        max_context=longest,
        enable_prefix_cache=False,
        limits=lambda: limits,
        clock=lambda: 0.0,
        policy=SchedulePolicy(),
    )


def _requests(
    rng: np.random.Generator, tasks: tuple[str, ...], burst: int, num_requests: int
) -> Iterator[Request]:
    """Bursts of one task, each of another than the one before."""
    task = tasks[0]
    for number in range(num_requests):
        if number % burst == 0:
            task = str(rng.choice([t for t in tasks if t != task]))
        prompt, output = (int(np.exp(rng.uniform(*np.log(lens)))) for lens in (PROMPT_LENS, OUTPUT_LENS))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        yield Request(str(number), (0,) * prompt, params, traffic_key=task)


def _launches(scheduler: Scheduler, requests: Iterator[Request]) -> Iterator[tuple[StepPlan, StepResult]]:
    """Each launch with tokens made up, until all requests have ended."""
    while True:
        for request in itertools.islice(requests, max(0, LINE - scheduler.num_waiting)):
            scheduler.add(request)
        plan = scheduler.schedule()
        if plan is None:
            return
        is_decode = plan.phase is Phase.DECODE
        result = StepResult(
            tuple((1,) * (c.num_tokens if is_decode else int(c.samples)) for c in plan.chunks)
        )
        scheduler.collect(plan, result)
        yield plan, result
