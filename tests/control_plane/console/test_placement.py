"""Where experts sit, from the engine's own status over HTTP: figures before and after moves, and what is not known."""

from typing import Any

import numpy as np
import pytest

from control_plane.console.device_watch import DeviceWatch
from control_plane.console.placement import device_imbalance, device_loads
from runtime.engine.expert_status import ExpertStatus, ForecastStatus
from tests.control_plane.console.test_pages import busy, of_type, watched


def status(rows: tuple[tuple[int, ...], ...], **facts: Any) -> ExpertStatus:
    """Two devices of two slots; three experts, of which expert 0 has a copy in layer 0 and expert 2 in layer 1."""
    known = {
        "num_devices": 2, "slots_per_device": 2, "slot_experts": ((0, 1, 2, 0), (0, 1, 2, 2)), "device_rows": rows,
        "imbalance": None, "waiting_moves": 0, "applied_moves": 0, "is_paused": False, "pinned_layers": (),
        "reason": "below_threshold", "alarm": None,
    }  # fmt: skip
    return ExpertStatus(**known | facts)


async def test_moves_part_the_figures_into_before_and_after() -> None:
    async with watched() as server:
        for i in range(1, 4):  # 30:10 and 20:20 each tick
            server.tick(**busy(i), experts=status(((30 * i, 10 * i), (20 * i, 20 * i)), imbalance=0.25))
        found = of_type("experts", await server.get("experts")).placement
        assert (found.available, found.num_devices, found.slots_per_device, found.num_copies) == (
            True,
            2,
            2,
            2,
        )
        assert found.copies == [[2, 1, 1], [1, 1, 2]]
        assert (found.imbalance_before, found.imbalance_after, found.plan_age_s) == (None, 1.25, None)
        assert found.device_loads_after == [1.25, 0.75]
        assert (found.device_rows, found.device_tokens) == ([[60, 20], [40, 40]], [100, 60])
        assert found.imbalance_now == 1.25
        server.tick(**busy(4), experts=status(((500, 40), (80, 80)), waiting_moves=3, reason="moving"))
        server.tick(**busy(5), experts=status(((900, 50), (90, 90)), waiting_moves=1, applied_moves=2))
        found = of_type("experts", await server.get("experts")).placement
        assert (found.moves_in_flight, found.num_moved, found.plan_age_s) == (1, 2, 2.0)
        assert (found.imbalance_before, found.imbalance_after) == (1.25, None), "what moved is in neither"
        last = {"applied_moves": 3, "is_paused": True, "pinned_layers": (1,), "alarm": "12 s late"}
        for i in range(6, 9):  # the last move is seen at 6; then 20:20 and 20:20 each tick
            server.tick(**busy(i), experts=status(((900 + 20 * i, 20 * i), (20 * i, 20 * i)), **last))
        found = of_type("experts", await server.get("experts")).placement
        assert (found.imbalance_before, found.imbalance_after, found.plan_age_s) == (1.25, 1.0, 8.0)
        assert (found.device_loads_before, found.device_loads_after) == ([1.25, 0.75], [1.0, 1.0])
        assert (found.is_paused, found.pinned_layers, found.alarm) == (True, [1], "12 s late")


async def test_the_forecast_names_its_source_and_the_largest_keys_only() -> None:
    shares = {f"key-{i}": share for i, share in enumerate([0.01] * 30 + [0.5, 0.2])}
    forecast = ForecastStatus("mix", {"last_window": 0.2, "mix": 0.05}, shares)
    async with watched() as server:
        server.tick(**busy(1), experts=status(((30, 10), (20, 20))))
        assert of_type("experts", await server.get("experts")).placement.forecast is None
        server.tick(**busy(2), experts=status(((30, 10), (20, 20)), forecast=forecast))
        found = of_type("experts", await server.get("experts")).placement.forecast
    assert (found.source, found.errors, found.num_keys) == ("mix", {"last_window": 0.2, "mix": 0.05}, 32)
    assert list(found.next_traffic.items())[:2] == [("key-30", 0.5), ("key-31", 0.2)]
    assert len(found.next_traffic) == 10


async def test_one_device_and_no_model_say_why() -> None:
    async with watched() as server:
        assert "not loaded" in of_type("experts", await server.get("experts")).placement.reason
        server.tick(**busy(1))
        found = of_type("experts", await server.get("experts")).placement
        assert (found.available, "one device" in found.reason) == (False, True)


def test_another_engine_begins_anew() -> None:
    watch = DeviceWatch()
    watch.add(status(((4, 4), (4, 4))), 1.0)
    watch.add(status(((8, 4), (4, 4)), applied_moves=5), 3.0)
    assert watch.figures().began_s == 3.0
    watch.add(status(((0, 0), (0, 0))), 5.0)  # fewer moves than before
    assert watch.figures().began_s is None
    watch.add(status(((9, 9), (9, 9))), 7.0)
    assert device_imbalance(watch.figures().rows_after) == 1.0


def test_an_idle_engine_has_no_imbalance() -> None:
    watch = DeviceWatch()
    for time_s in (1.0, 3.0, 5.0):
        watch.add(status(((7, 1), (1, 1))), time_s)
    assert watch.figures().rows_after is None
    assert (device_imbalance(None), device_loads(None)) == (None, [])


def test_layers_without_rows_do_not_count_as_even() -> None:
    rows = np.array([[3, 1], [0, 0]])
    assert device_imbalance(rows) == pytest.approx(1.5)
    assert device_loads(rows) == pytest.approx([1.5, 0.5])
