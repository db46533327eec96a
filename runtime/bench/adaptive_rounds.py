"""Rounds of the comparison: each plays every mode on the same requests, saturated and on the swinging load."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.adaptive_modes import DYNAMIC, Mode, ModePlayer, Way
from runtime.bench.adaptive_traffic import Job, Lengths, draw_jobs, steady_arrivals, swinging_arrivals
from runtime.bench.limits import MachineLimits
from runtime.bench.mode_figures import open_figures, score
from runtime.bench.paired import abba_order
from runtime.bench.report import console
from runtime.bench.run_utilisation import run_utilisation

_SATURATED_SHARE = 0.3  # of a round's time
_SLOWEST = 1.8  # seconds that the slowest mode takes for what ours does in one
_MIN_SATURATED = 3  # times the requests of a full closed queue


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played: lengths, the load, where requests come from."""

    lengths: Lengths
    rate: float  # requests/s on average
    num_days: int
    seed: int

    def swinging(self, num: int, number: int) -> list[Job]:
        seed = self._seed(number)
        return draw_jobs(self.lengths, swinging_arrivals(num, self.rate, self.num_days, seed), seed)

    def steady(self, num: int, number: int) -> list[Job]:
        """Also for a saturated engine, which takes them as fast as it can."""
        return draw_jobs(
            self.lengths, steady_arrivals(num, self.rate, self._seed(number)), self._seed(number)
        )

    def _seed(self, number: int) -> int:
        return self.seed * 10_007 + number


@dataclass(frozen=True, slots=True)
class Round:
    """One mode's figures in one round, and the jobs for those who play them again on the virtual clock."""

    mode: Mode
    number: int
    figures: dict[str, Any]
    saturated_jobs: list[Job]
    open_jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Stage:
    """Plays modes and takes their figures."""

    player: ModePlayer
    limits: MachineLimits

    def play(
        self, modes: Sequence[Mode], saturated: list[Job], swinging: list[Job], number: int
    ) -> list[Round]:
        """All modes saturated, then all on the swinging load: what is compared runs close together, as a shared machine
        is slow for seconds at a time."""
        figures = {mode: self.saturate(mode, saturated, number) for mode in modes}
        for mode in modes:
            figures[mode] |= self.open(mode, swinging, number)
        return [Round(mode, number, found, saturated, swinging) for mode, found in figures.items()]

    def saturate(self, mode: Mode, jobs: list[Job], number: int) -> dict[str, Any]:
        played, tok_s = self.player.saturated(mode, jobs, number)
        engine = self.player.engine
        context = sum(j.prompt_len + j.output_len / 2 for j in jobs) / len(jobs)
        used = run_utilisation(played, engine.shape, self.limits, context, self.player.config.model.dtype)
        return {
            "tok_s": round(tok_s, 1),
            "utilisation": round(used.value, 4),
            "utilisation_bytes": round(used.memory, 4),
            "utilisation_flop": round(used.compute, 4),
            "busy_share": round(played.busy_share, 3),
        }

    def open(self, mode: Mode, jobs: list[Job], number: int) -> dict[str, Any]:
        played = self.player.open(mode, jobs, number)
        return open_figures(played.times, played.duration_s, self.player.config.slo)


def choose_static(
    stage: Stage, work: Workload, sizes: Sequence[int], timeouts_s: Sequence[float], num: int
) -> tuple[Mode, list[dict[str, Any]]]:
    """The best of the grid, and the whole grid. The size with the best throughput first, then the time-outs at it and
    at the size next below, by goodput and p99 on a short swinging load.
    """
    rows = []
    rates = {}
    for size in sizes:
        mode = Mode(Way.STATIC, size, max(timeouts_s))
        rates[size] = stage.saturate(mode, work.steady(max(num, 2 * size), 900), 900)["tok_s"]
    fastest = sorted(rates, key=lambda size: rates[size], reverse=True)[:2]
    jobs = work.swinging(num, 901)
    for size in fastest:
        for timeout_s in timeouts_s:
            mode = Mode(Way.STATIC, size, timeout_s)
            rows.append((mode, {"tok_s": rates[size]} | stage.open(mode, jobs, 901)))
    best = max(rows, key=lambda row: score(row[1]))[0]
    grid = [{"batch": size, "tok_s": rate} for size, rate in rates.items()]
    grid += [{"batch": m.rows, "timeout_ms": 1e3 * m.timeout_s} | found for m, found in rows]
    return best, grid


def choose_fixed(
    stage: Stage, work: Workload, rungs: Sequence[int], num: int
) -> tuple[Mode, list[dict[str, Any]]]:
    """The best single rung, by goodput and p99 on a short swinging load; rungs far behind in throughput are not tried
    there."""
    modes = [Mode(Way.FIXED, rows) for rows in rungs]
    saturated = work.steady(num, 910)
    found = {mode: stage.saturate(mode, saturated, 910) for mode in modes}
    most = max(figures["tok_s"] for figures in found.values())
    jobs = work.swinging(num, 911)
    for mode in modes:
        if found[mode]["tok_s"] >= 0.75 * most:
            found[mode] |= stage.open(mode, jobs, 911)
    best = max((m for m in modes if "p99_ms" in found[m]), key=lambda m: score(found[m]))
    return best, [{"rows": mode.rows} | figures for mode, figures in found.items()]


def play_rounds(
    stage: Stage,
    work: Workload,
    others: Sequence[Mode],
    num_rounds: int,
    seconds_left: Callable[[], float],
    min_saturated: int,
) -> list[list[Round]]:
    """Rounds in ABBA order, each as long as the time that is left allows; a list of modes for every round."""
    rounds: list[list[Round]] = []
    for number, modes in enumerate(abba_order((*others, DYNAMIC), num_rounds)):
        round_s = max(1.0, seconds_left()) / (num_rounds - number)
        num_saturated, num_open = sizes_of_round(round_s, work.rate, len(modes), min_saturated)
        saturated, swinging = work.steady(num_saturated, number), work.swinging(num_open, number)
        start_s = time.monotonic()
        rounds.append(stage.play(modes, saturated, swinging, number))
        console.print(
            f"pair {number + 1} of {num_rounds}: {num_saturated} requests saturated, {num_open} on the swinging load, "
            f"{time.monotonic() - start_s:.0f} s",
            highlight=False,
        )
    return rounds


def sizes_of_round(round_s: float, rate: float, num_modes: int, min_saturated: int) -> tuple[int, int]:
    """(requests saturated, requests on the swinging load) that fit into a round; `rate` is the open load's."""
    per_mode_s = round_s / (num_modes - 1 + _SLOWEST)
    num_saturated = int(per_mode_s * _SATURATED_SHARE * rate)
    return max(min_saturated, num_saturated), max(60, int(per_mode_s * (1 - _SATURATED_SHARE) * rate))
