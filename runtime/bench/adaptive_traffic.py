"""Load that swings: lengths of a recorded chat service, arrivals by a Poisson process whose rate follows a day.

One day has length 1. Its light part lasts DAY_SHARE of it: the rate rises from 1 to 8 and falls back, 1 + 7 sin^2;
then comes the night, at 30 % of the light part's mean.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.bench.replay import Planned
from runtime.bench.traces import TraceRequest, fitting_factor, read_trace, scale_lengths
from runtime.bench.workload import random_prompts

LENGTHS = Path(__file__).parent / "data" / "azure_conv_lengths.csv.gz"
PEAK = 8.0  # times the lowest rate of the light part
NIGHT = 0.3  # of the light part's mean rate
DAY_SHARE = 0.75
SHAPE_TEXT = (
    f"a day of length 1: 1 + {PEAK - 1:g} sin^2(pi u / {DAY_SHARE:g}) for u < {DAY_SHARE:g}, then a night at "
    f"{NIGHT:g} of the light part's mean"
)
_GRID = 4096  # points of a day on which the rate is summed up


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths after scaling by `factor`, in recorded order; drawn from again and again."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    factor: float

    @property
    def mean_context(self) -> float:
        """Positions that a row attends to on average while it decodes."""
        return float(np.mean(self.prompt) + np.mean(self.output) / 2)

    def quantile_prompt(self, share: float) -> int:
        return int(np.quantile(self.prompt, share))


@dataclass(frozen=True, slots=True)
class Job:
    """One request without its words: when it comes after the first, and how long it is."""

    arrival_s: float
    prompt_len: int
    output_len: int


def read_lengths(trace: Path | None, max_context: int) -> Lengths:
    """All lengths times the one factor that makes the longest request just fit. Raises ValueError on a bad file."""
    requests = read_trace(trace) if trace is not None else _bundled()
    factor = fitting_factor(requests, max_context)
    scaled = scale_lengths(requests, factor, max_context)
    return Lengths(tuple(r.prompt_len for r in scaled), tuple(r.output_len for r in scaled), factor)


def rate_shape(u: np.ndarray) -> np.ndarray:
    """Rate at the times `u` (in days) as a multiple of the lowest rate of the light part."""
    u = np.asarray(u) % 1.0
    light = 1 + (PEAK - 1) * np.sin(np.pi * u / DAY_SHARE) ** 2
    return np.where(u < DAY_SHARE, light, NIGHT * (1 + PEAK) / 2)


def mean_shape() -> float:
    """Mean of rate_shape over a day."""
    return DAY_SHARE * (1 + PEAK) / 2 + (1 - DAY_SHARE) * NIGHT * (1 + PEAK) / 2


def swinging_arrivals(num: int, mean_rate: float, num_days: int, seed: int) -> np.ndarray:
    """Times in seconds of num arrivals whose rate follows num_days days, mean_rate requests a second on average.

    Given how many come, the arrivals of a Poisson process are independent draws from its rate, sorted; so the load
    of each run is exactly what was asked for.
    """
    duration_s = num / mean_rate
    grid = np.linspace(0.0, 1.0, _GRID + 1)
    rates = rate_shape((grid[:-1] + grid[1:]) / 2)
    summed = np.concatenate([[0.0], np.cumsum(rates) / rates.sum()])
    draws = np.sort(np.random.default_rng(seed).random(num)) * num_days
    days = np.minimum(np.floor(draws), num_days - 1)
    return (days + np.interp(draws - days, summed, grid)) * duration_s / num_days


def steady_arrivals(num: int, rate: float, seed: int) -> np.ndarray:
    """Times in seconds of num Poisson arrivals at a constant rate."""
    return np.sort(np.random.default_rng(seed).random(num)) * num / rate


def draw_jobs(lengths: Lengths, arrivals: np.ndarray, seed: int) -> list[Job]:
    """A request for each arrival, its lengths drawn from the trace (prompt and output together)."""
    picks = np.random.default_rng((seed, 1)).integers(len(lengths.prompt), size=len(arrivals))
    return [Job(float(t), lengths.prompt[i], lengths.output[i]) for t, i in zip(arrivals, picks, strict=True)]


def with_prompts(jobs: list[Job], vocab_size: int, seed: int) -> list[Planned]:
    """Random prompts that share nothing."""
    return [
        Planned(job.arrival_s, random_prompts(1, job.prompt_len, vocab_size, seed * 1_000_003 + i)[0], job.output_len)
        for i, job in enumerate(jobs)
    ]  # fmt: skip


def _bundled() -> list[TraceRequest]:
    with gzip.open(LENGTHS, "rt", encoding="utf-8") as lines:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]
    return [TraceRequest(0.0, prompt_len, output_len) for prompt_len, output_len in rows]
