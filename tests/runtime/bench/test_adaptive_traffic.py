from pathlib import Path

import numpy as np
import pytest

from runtime.bench.adaptive_traffic import (
    DAY_SHARE,
    draw_jobs,
    mean_shape,
    rate_shape,
    read_lengths,
    steady_arrivals,
    swinging_arrivals,
    with_prompts,
)

DAY = np.linspace(0, 1, 10_001)[:-1]


def test_the_light_part_swings_from_one_to_eight_and_the_night_is_thirty_percent_of_it() -> None:
    rates = rate_shape(DAY)
    light, night = rates[DAY < DAY_SHARE], rates[DAY >= DAY_SHARE]
    assert light.min() == pytest.approx(1.0)
    assert light.max() == pytest.approx(8.0, rel=1e-4)
    assert np.unique(night) == pytest.approx([0.3 * light.mean()], rel=1e-3)
    assert rates.mean() == pytest.approx(mean_shape(), rel=1e-3)
    assert rate_shape(DAY + 3) == pytest.approx(rates)  # day by day the same


@pytest.mark.parametrize("num_days", [1, 2])
def test_arrivals_follow_the_shape_at_exactly_the_load_asked_for(num_days: int) -> None:
    num, rate = 200_000, 50.0
    arrivals = swinging_arrivals(num, rate, num_days, seed=1)
    duration_s = num / rate
    assert (np.diff(arrivals) >= 0).all()
    assert 0 <= arrivals[0] < arrivals[-1] <= duration_s
    counts, edges = np.histogram(arrivals / duration_s * num_days % 1.0, bins=40, range=(0, 1))
    expected = rate_shape((edges[:-1] + edges[1:]) / 2) / mean_shape() * num / 40
    assert np.abs(counts / expected - 1).max() < 0.08


def test_gaps_of_a_steady_load_are_exponential() -> None:
    gaps = np.diff(steady_arrivals(100_000, 20.0, seed=2))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)


def test_the_bundled_lengths_fit_the_context_by_one_factor() -> None:
    lengths = read_lengths(None, 2048)
    assert lengths.factor == pytest.approx(2048 / 14_089)  # the whole trace's longest request
    assert len(lengths.prompt) == len(lengths.output) == 1938
    assert 2046 <= max(p + o for p, o in zip(lengths.prompt, lengths.output, strict=True)) <= 2048
    assert min(lengths.prompt + lengths.output) >= 1
    assert lengths.mean_context < 2048


def test_a_trace_of_ones_own_replaces_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("t_s,prompt_tokens,output_tokens\n0,100,50\n1,40,60\n")
    lengths = read_lengths(path, 75)
    assert (lengths.prompt, lengths.output, lengths.factor) == ((50, 20), (25, 30), 0.5)


def test_jobs_are_the_same_for_a_seed_and_keep_pairs_of_lengths_together() -> None:
    lengths = read_lengths(None, 2048)
    arrivals = steady_arrivals(50, 10.0, seed=3)
    jobs = draw_jobs(lengths, arrivals, seed=3)
    assert jobs == draw_jobs(lengths, arrivals, seed=3)
    assert jobs != draw_jobs(lengths, arrivals, seed=4)
    pairs = set(zip(lengths.prompt, lengths.output, strict=True))
    assert {(j.prompt_len, j.output_len) for j in jobs} <= pairs
    plans = with_prompts(jobs, 4096, seed=3)
    assert [(p.offset_s, len(p.prompt), p.num_new) for p in plans] == [
        (j.arrival_s, j.prompt_len, j.output_len) for j in jobs
    ]
    assert len({p.prompt[:8] for p in plans if len(p.prompt) >= 8}) == sum(len(p.prompt) >= 8 for p in plans)
