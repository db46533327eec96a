"""The batch size closed over a simple plant: a step takes a + b * rows. It must settle, and settle well."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.adaptive.batch_size import BatchSizeState, decide_batch_size
from tests.runtime.adaptive.observations import NOW_S, RUNGS, make_config, observe

NUM_TICKS = 120
TICK_S = 0.5


@dataclass(frozen=True)
class Plant:
    """Seconds of a step on a rung, with as many waiting as it takes to keep every row busy."""

    fixed_s: float
    row_s: float
    pages_per_row: float = 0.0
    noise: float = 0.0
    leaving: float = 1.0  # share of the running rows that end within a tick
    hiccups: tuple[int, ...] = ()  # ticks at which a step takes ten times as long
    cliff: int | None = None  # above so many rows a step takes three times as long
    known: tuple[int, ...] = ()  # rungs that were measured before

    def step_s(self, rung: int) -> float:
        slow = 3 if self.cliff is not None and rung > self.cliff else 1
        return slow * (self.fixed_s + self.row_s * rung)

    def run(self, config, *, knows_rungs, start=32) -> list[int]:
        state, size, running, sizes = BatchSizeState(start), start, start, []
        noise, measured = random.Random(1), defaultdict(list)
        for rung in self.known:
            measured[rung].append(self.step_s(rung))
        for tick in range(NUM_TICKS):
            now_s = NOW_S + TICK_S * tick
            running = max(size, running - math.ceil(self.leaving * running))
            rung = next(r for r in RUNGS if r >= running)
            step_s = self.step_s(rung) * (1 + noise.uniform(-self.noise, self.noise))
            step_s *= 10 if tick in self.hiccups else 1
            measured[rung].append(step_s)
            obs = observe(
                time_s=now_s,
                num_running=running,
                num_waiting=5,
                used_pages=round(min(1.0, self.pages_per_row * running) * 1000),
                num_pages=1000,
                decode_step_s=step_s,
                decode_step_s_by_rows={r: median(times) for r, times in measured.items()}
                if knows_rungs
                else {},
            )
            state, choice = decide_batch_size(state, obs, config, now_s)
            size = choice.value
            sizes.append(size)
        return sizes


def num_turns(sizes: list[int]) -> int:
    """Changes of direction."""
    moves = [b - a for a, b in pairwise(sizes) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 0.09),
    st.floats(1e-5, 0.01),
    st.sampled_from(["current", "published"]),
    st.booleans(),
    st.sampled_from(RUNGS),
)
def test_it_settles_at_the_largest_rung_that_meets_the_target(fixed_s, row_s, form, knows_rungs, start):
    config = make_config(controller={"form": form})
    plant = Plant(fixed_s, row_s)
    sizes = plant.run(config, knows_rungs=knows_rungs, start=start)
    settled = sizes[-1]
    assert set(sizes[NUM_TICKS // 2 :]) == {settled}
    assert num_turns(sizes) <= 4, sizes
    fitting = [r for r in RUNGS if plant.step_s(r) <= 0.75 * 0.1]
    best = max(fitting, default=RUNGS[0])
    if form == "current":
        assert settled == best
    else:
        assert settled <= 48
        assert settled >= min(best, 24)


def test_the_published_form_falls_short_of_what_the_target_allows():
    plant = Plant(0.005, 0.0005)  # 128 rows take 69 ms
    sizes = {form: plant.run(make_config(controller={"form": form}), knows_rungs=True) for form in FORMS}
    assert sizes["current"][-1] == 128
    assert sizes["published"][-1] == 48


FORMS = ("current", "published")


def test_it_settles_below_a_cliff_although_the_target_allows_more():
    """96 rows would take 15 ms of 100, but compute fewer rows a second than 48."""
    sizes = Plant(0.001, 0.0001, cliff=48).run(make_config(), knows_rungs=True)
    assert sizes[-60:] == [48] * 60
    assert num_turns(sizes) <= 2
    published = Plant(0.001, 0.0001, cliff=32).run(
        make_config(controller={"form": "published"}), knows_rungs=True
    )
    assert published[-1] == 48  # as published, it knows nothing of throughput


@pytest.mark.parametrize("start", RUNGS)
def test_small_rungs_that_compute_more_rows_a_second_are_no_trap(start):
    """Small rungs were served when few came and are known to be efficient. Going down to them leaves no measurement
    that leads up again, so the rule for throughput ends at the base, whether coming from above or from below."""
    plant = Plant(0.001, 0.0001, cliff=8, known=RUNGS)
    sizes = plant.run(make_config(), knows_rungs=True, start=start)
    assert set(sizes[-60:]) == {32}
    assert min(sizes) >= min(start, 32)
    assert num_turns(sizes) <= 1


def test_memory_settles_too():
    sizes = Plant(0.001, 0.0001, pages_per_row=1 / 49).run(make_config(), knows_rungs=True)
    assert sizes[-40:] == [32] * 40  # 48 rows take 98 % of the pages, above kv_threshold
    assert num_turns(sizes) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_noise_does_not_shake_it(form):
    """Measurements 3 % off, with rungs of which none lies inside the band: 32 takes 67 ms, 48 takes 99."""
    config = make_config(controller={"form": form})
    sizes = Plant(0.003, 0.002, noise=0.03).run(config, knows_rungs=True)
    assert sizes[-60:] == [32] * 60


@pytest.mark.parametrize("knows_rungs", [True, False])
def test_a_hiccup_of_the_machine_is_made_up_for(knows_rungs):
    """What was measured during it stays in the table, for nothing runs on that rung any more to correct it."""
    sizes = Plant(0.005, 0.0002, hiccups=(60,)).run(make_config(), knows_rungs=knows_rungs)
    assert sizes[59] == 128
    assert sizes[60] < 128
    assert sizes[-40:] == [128] * 40


def test_long_answers_do_not_make_it_fall_too_far():
    """128 rows are too many, 64 are right, and only a tenth of the rows end within a second."""
    plant = Plant(0.005, 0.001, leaving=0.05)
    sizes = plant.run(make_config(), knows_rungs=True, start=128)
    assert sizes[-40:] == [64] * 40
    assert min(sizes) >= 48


def test_without_smoothing_it_goes_to_and_fro():
    plant = Plant(0.003, 0.002)
    damped = plant.run(make_config(), knows_rungs=False)
    raw = plant.run(make_config(smoothing=False), knows_rungs=False)
    assert num_turns(raw) > 20
    assert num_turns(damped) <= 2
