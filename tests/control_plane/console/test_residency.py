"""Experts that sleep, from the engine's own status over HTTP: of the span and of late, and what is not known."""

from dataclasses import replace
from typing import Any

import pytest

from runtime.engine.expert_status import ResidencyStatus
from tests.control_plane.console.test_pages import busy, of_type, watched

START = ResidencyStatus(
    num_slots=2, num_experts=3, num_resident=3, slot_experts=((2, 0), (1, -1)), layers=(0, 1), num_steps=1000,
    layer_rows=(500, 500), layer_asleep_rows=(0, 0), hit_rates=(1.0, 1.0), resident_rows=1000, asleep_rows=0, late_fetches=70,
    prefetches_used=80, prefetches_unused=90, changes={"woke": 9, "evicted": 9, "slept": 9, "kept_by_hysteresis": 9},
    device_bytes=4096, host_bytes=6144,
)  # fmt: skip


def after(i: int, **facts: Any) -> ResidencyStatus:
    """`i` ticks later, each with 10 steps, 100 rows in each layer, 40 of which are asleep in layer 1."""
    return replace(
        START, num_steps=1000 + 10 * i, layer_rows=(500 + 100 * i,) * 2, layer_asleep_rows=(0, 40 * i),
        resident_rows=1000 + 160 * i, asleep_rows=40 * i, late_fetches=70 + 5 * i, prefetches_used=80 + 20 * i,
        prefetches_unused=90 + 2 * i,
        changes={"woke": 9, "evicted": 9 + 3 * i, "slept": 9 + i, "kept_by_hysteresis": 9}, **facts,
    )  # fmt: skip


async def test_figures_are_of_the_span_and_not_since_the_start() -> None:
    async with watched() as server:
        for i in range(5):
            server.tick(**busy(i), residency=after(i))
        page = of_type("experts", await server.get("experts"))
        found = page.residency
        assert (found.available, found.num_slots, found.num_experts, found.num_resident) == (True, 2, 3, 3)
        assert found.resident == [[1, 0, 1], [0, 1, 0]]
        assert (found.hit_share, found.hit_share_now) == (pytest.approx(0.8), pytest.approx(0.8))
        assert found.layer_hit_shares == [1.0, pytest.approx(0.6)]
        assert (found.late_fetches_step, found.prefetches_used_step, found.prefetches_unused_step) == (
            0.5,
            2.0,
            0.2,
        )
        assert found.changes == {"woke": 0, "evicted": 12, "slept": 4, "kept_by_hysteresis": 0}
        assert (found.device_bytes, found.host_bytes) == (4096, 6144)
        plots = {(plot.name, plot.label): plot.values for plot in page.series}
        assert plots["resident_share", ""][-1] == pytest.approx(0.8)
        assert plots["late_fetches", ""][-1] == pytest.approx(0.5)
        assert plots["residency_changes", "evicted"][-1] == pytest.approx(1.5)
        assert plots["residency_changes", "woke"][-1] == 0.0


async def test_now_is_the_last_minute_whatever_the_span() -> None:
    async with watched() as server:
        for i in range(100):
            server.tick(**busy(i), residency=after(i))
        worse = after(99)
        for i in range(1, 40):  # all rows of these are asleep
            late = replace(
                worse,
                num_steps=worse.num_steps + i,
                asleep_rows=worse.asleep_rows + 50 * i,
                late_fetches=565 + 7 * i,
            )
            server.tick(**busy(100 + i), residency=late)
        for span in ("15min", "3h", "24h"):
            found = of_type("experts", await server.get("experts", span)).residency
            assert (found.hit_share_now, found.late_fetches_step_now) == (0.0, 7.0), span
            assert found.hit_share > 0.5, span


async def test_no_traffic_leaves_gaps_and_no_figures() -> None:
    async with watched() as server:
        server.tick(**busy(1), residency=START)
        found = of_type("experts", await server.get("experts")).residency
        assert (found.hit_share, found.late_fetches_step, found.resident) == (
            None,
            None,
            [[1, 0, 1], [0, 1, 0]],
        )
        for _ in range(20):
            server.tick(**busy(1), residency=START)
        page = of_type("experts", await server.get("experts"))
        found = page.residency
        assert (found.hit_share_now, found.layer_hit_shares, found.prefetches_used_step) == (
            None,
            [None, None],
            None,
        )
        assert {
            plot.values[-1] for plot in page.series if plot.name in ("resident_share", "late_fetches")
        } == {None}


async def test_where_no_expert_sleeps_and_without_a_model_there_is_nothing() -> None:
    async with watched() as server:
        assert "not loaded" in of_type("experts", await server.get("experts")).residency.reason
        for i in range(3):
            server.tick(**busy(i))
        page = of_type("experts", await server.get("experts"))
        assert (page.residency.available, page.residency.resident) == (False, [])
        assert "all experts are resident" in page.residency.reason
        assert not any(plot.name in ("resident_share", "residency_changes") for plot in page.series)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("draining", "all experts are resident"), ("failed", "not loaded"), ("stopped", "not loaded")],
)
async def test_a_load_that_failed_does_not_say_that_all_is_well(state: str, reason: str) -> None:
    async with watched() as server:
        server.tick(**busy(1), state=state)
        page = of_type("experts", await server.get("experts"))
        assert reason in page.residency.reason
        assert ("one device" if state == "draining" else "not loaded") in page.placement.reason
