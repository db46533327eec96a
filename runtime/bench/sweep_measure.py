"""Measures a SweepPlan on a ready engine: every case once a round, the order turned round each time.

Decode counts only the window in which all rows of the batch run together, so prefill, the first launches and the rows
that end early are no part of it. A round gives one figure a case; the report takes medians over rounds, because
a shared machine drifts within minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from runtime.bench.client import RequestTimes
from runtime.bench.report import progress_bar
from runtime.bench.running import RunningEngine
from runtime.bench.sweep_plan import SweepPlan
from runtime.bench.workload import greedy_request, random_prompts

_MIN_STEPS = 8.0


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which all rows decoded together; `num_steps` is the number of tokens of one row in it."""

    seconds: float
    num_tokens: int
    num_steps: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One batch size in one round. `request_s`: median time from submission to a request's `output_len`-th token."""

    window: Window
    request_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all cases: decode by batch size, prefill seconds by (prompts, length) and by single length."""

    decode: dict[int, DecodeSample]
    shapes: dict[tuple[int, int], float]
    lengths: dict[int, float]


def measure_round(engine: RunningEngine, plan: SweepPlan, index: int) -> Round:
    """Round `index`; odd rounds go backwards, so that a slow drift weighs on both ends alike."""
    turn = -1 if index % 2 else 1
    decode: dict[int, DecodeSample] = {}
    shapes: dict[tuple[int, int], float] = {}
    lengths: dict[int, float] = {}
    with progress_bar() as progress:
        task = progress.add_task(f"round {index + 1} of {plan.rounds}", total=len(plan.batches) + 1)
        for num_rows in plan.batches[::turn]:
            progress.update(task, description=f"round {index + 1} of {plan.rounds}: decode {num_rows} rows")
            decode[num_rows] = measure_decode(engine, num_rows, plan, seed=1000 * index + num_rows)
            progress.advance(task)
        progress.update(task, description=f"round {index + 1} of {plan.rounds}: prefill")
        for num, length in plan.shapes[::turn]:
            shapes[num, length] = measure_prefill(engine, num, length, f"shape-{index}")
        for length in plan.lengths[::turn]:
            lengths[length] = min(
                measure_prefill(engine, 1, length, f"length-{index}-{again}") for again in range(3)
            )
    return Round(decode, shapes, lengths)


def measure_decode(engine: RunningEngine, num_rows: int, plan: SweepPlan, seed: int) -> DecodeSample:
    """Submit num_rows different prompts at once and look at the window in which all of them decode."""
    times = burst(engine, num_rows, plan.input_len, plan.new_tokens(num_rows), f"decode-{seed}", seed)
    each = sorted(time_to_token(t, plan.output_len) for t in times)
    return DecodeSample(steady_window(times), each[len(each) // 2])


def measure_prefill(engine: RunningEngine, num: int, length: int, tag: str) -> float:
    """Seconds until each of num prompts has its first token."""
    times = burst(
        engine, num, length, 1, f"{tag}-{num}x{length}", seed=crc32(f"{tag}-{num}x{length}".encode())
    )
    return max(t.event_s[0] for t in times) - min(t.arrival_s for t in times)


def burst(
    engine: RunningEngine, num: int, length: int, num_new: int, name: str, seed: int
) -> list[RequestTimes]:
    """num random prompts together, exactly num_new tokens each. Raises RuntimeError when one came out otherwise."""
    prompts = random_prompts(num, length, engine.shape.vocab_size, seed)
    engine.client.submit(greedy_request(f"{name}-{i}", prompt, num_new) for i, prompt in enumerate(prompts))
    engine.client.wait()
    found = engine.client.take()
    for request_id, times in found.items():
        if times.num_tokens != num_new:
            raise RuntimeError(
                f"{request_id}: {times.num_tokens} tokens instead of {num_new} ({times.error})"
            )
    return list(found.values())


def steady_window(times: Sequence[RequestTimes]) -> Window:
    """From the first launch that all rows shared to the last before any row ended. Raises RuntimeError when too short.

    Every launch publishes its events at one time. A row's first event is its prefill, its second may belong to a
    launch that was planned before the last row joined, and counts as the start only.
    """
    if any(len(t.event_s) < 3 for t in times):
        raise RuntimeError("a row got its tokens in fewer than three launches: raise --output")
    start_s = max(t.event_s[1] for t in times)
    first_end_s = min(t.event_s[-1] for t in times)
    inside = [
        (at_s, num)
        for t in times
        for at_s, num in zip(t.event_s, t.event_tokens, strict=True)
        if start_s < at_s < first_end_s
    ]
    num_tokens = sum(num for _, num in inside)
    num_steps = num_tokens / len(times)
    if num_steps < _MIN_STEPS:
        raise RuntimeError(
            f"{len(times)} rows ran together for {num_steps:.1f} steps only, fewer than {_MIN_STEPS:g}: raise --output"
        )
    return Window(max(at_s for at_s, _ in inside) - start_s, num_tokens, num_steps)


def time_to_token(times: RequestTimes, num: int) -> float:
    """Seconds from submission until the request had `num` tokens."""
    seen = 0
    for at_s, more in zip(times.event_s, times.event_tokens, strict=True):
        seen += more
        if seen >= num:
            return at_s - times.arrival_s
    raise ValueError(f"the request has {seen} tokens, fewer than {num}")
