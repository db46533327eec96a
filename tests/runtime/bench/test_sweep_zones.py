import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.sweep_zones import LARGE_GAIN, BatchPoint, Zone, Zones, find_zones, zone_of

# Published elsewhere: 1.6 B parameters, 8 experts, one A100, sequence 256.
REFERENCE = tuple(
    BatchPoint(batch, ms / 1e3, tokens_s)
    for batch, ms, tokens_s in (
        (1, 45, 22), (8, 62, 129), (32, 105, 305), (64, 158, 405), (128, 210, 610), (256, 325, 788),
    )
)  # fmt: skip


def zones_of(*rates: tuple[int, float]) -> Zones:
    return find_zones([BatchPoint(batch, batch / rate, rate) for batch, rate in rates])


def test_the_published_table() -> None:
    zones = find_zones(REFERENCE)
    assert [s.zone for s in zones.steps] == [Zone.SMALL, Zone.FAIR, Zone.LARGE, Zone.FAIR, Zone.LARGE]
    assert (zones.small_until, zones.fair_until, zones.large_from, zones.no_gain_from) == (8, 32, 128, None)
    assert [(s.start, s.end) for s in zones.dips] == [(32, 64)]
    assert [round(s.gain, 2) for s in zones.steps] == [0.80, 0.54, 0.33, 0.51, 0.29]
    assert [round(s.tokens_s_per_added_row, 1) for s in zones.steps] == [15.3, 7.3, 3.1, 3.2, 1.4]


def test_flat_and_falling_tokens_are_no_gain() -> None:
    zones = zones_of((1, 100), (2, 190), (4, 250), (8, 255), (16, 240))
    assert [s.zone for s in zones.steps] == [Zone.SMALL, Zone.LARGE, Zone.NO_GAIN, Zone.NO_GAIN]
    assert (zones.small_until, zones.large_from, zones.no_gain_from) == (2, 2, 4)
    assert zones.dips == ()


def test_rows_that_cost_nothing_are_small_to_the_end() -> None:
    zones = zones_of((1, 10), (8, 80), (32, 320))
    assert (zones.small_until, zones.fair_until, zones.large_from, zones.no_gain_from) == (32, 32, None, None)


def test_one_size_has_no_steps() -> None:
    zones = zones_of((8, 50))
    assert zones.steps == ()
    assert (zones.small_until, zones.large_from) == (8, None)


@given(st.floats(1.01, 4), st.integers(1, 64), st.integers(2, 64))
def test_large_is_where_latency_outgrows_tokens(ratio: float, start: int, factor: int) -> None:
    """With all rows in the step, tokens/s x step time = rows: the two ratios per doubling multiply to 2."""
    growth = ratio ** math.log2(factor)
    a = BatchPoint(start, 1.0, float(start))
    b = BatchPoint(start * factor, growth, start * factor / growth)
    step = find_zones([a, b]).steps[0]
    assert step.latency_growth == pytest.approx(ratio - 1)
    assert (1 + step.gain) * (1 + step.latency_growth) == pytest.approx(2)
    if not math.isclose(step.gain, LARGE_GAIN, abs_tol=1e-9):
        assert (step.zone in (Zone.LARGE, Zone.NO_GAIN)) == (step.latency_growth > step.gain)


@given(st.floats(-0.9, 1.5), st.floats(-0.9, 1.5))
def test_a_better_gain_is_never_a_worse_zone(a: float, b: float) -> None:
    order = [Zone.NO_GAIN, Zone.LARGE, Zone.FAIR, Zone.SMALL]
    low, high = sorted((a, b))
    assert order.index(zone_of(low)) <= order.index(zone_of(high))


@given(st.lists(st.floats(0.5, 1e4), min_size=2, max_size=7), st.integers(2, 5))
def test_the_gain_of_a_step_does_not_depend_on_its_width(rates: list[float], power: int) -> None:
    """A size left out between two equal doublings changes no judgement of the whole."""
    gain = rates[0] / rates[1]
    near = zones_of((1, 100.0), (2, 100.0 * gain)).steps[0]
    far = zones_of((1, 100.0), (2**power, 100.0 * gain**power)).steps[0]
    assert far.gain == pytest.approx(near.gain)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "at least one"),
        ([BatchPoint(1, 0.0, 5.0)], "above zero"),
        ([BatchPoint(2, 1.0, 1.0), BatchPoint(2, 1.0, 1.0)], r"ascend, got \[2, 2\]"),
    ],
)
def test_wrong_points_are_refused(points: list[BatchPoint], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_zones(points)
