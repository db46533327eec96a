"""Experts that sleep, seen and steered over HTTP on the real, tiny engine while it answers."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.config import parse_config
from runtime.engine.loop import EngineLoop
from runtime.ladder.late_compiles import monitor
from tests.control_plane.live_engine import CONFIG, Load, live_server
from tests.runtime.engine.test_loop import make_loop


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    data = CONFIG.model_dump(mode="json")
    data["experts"] |= {"resident_experts": 3, "prefetch_experts": 1, "wake_margin": 0.0}
    data["ladder"] |= {"decode_rows": [4], "prefill_tokens": [64]}
    data["batch_processing"] |= {"dynamic_adjust_window": "10ms"}
    loop = make_loop(parse_config(data))
    loop.start()
    loop.wait_complete(120)
    yield loop
    loop.shutdown()


async def test_residency_is_seen_and_steered_under_load(loop) -> None:
    async with live_server(loop) as server:
        before = await server.get("/admin/v1/experts")
        assert before["experts"] is None
        assert before["residency"]["slot_experts"] == [[0, 1, 2], [0, 1, 2]]
        assert before["residency"]["hit_rates"] == [None, None]
        monitor.arm()
        async with Load(server, 4) as load:
            await load.more(4)
            off = await server.client.patch(
                "/admin/v1/config",
                json={"patch": {"experts": {"swaps_per_step": 0}}},
                headers={"If-Match": '"1"'},
            )
            assert off.status_code == 200
            await load.more(4)
        assert not load.errors
        assert all(len(texts) == 1 for texts in load.texts.values())
        assert loop.snapshot().late_compiles == 0
        found = (await server.get("/admin/v1/experts"))["residency"]
        assert found["changes"]["evicted"] > 0
        assert found["num_resident"] == 6
        assert 0 < found["asleep_rows"] < found["resident_rows"] + found["asleep_rows"]
        assert found["host_bytes"] * 3 == found["device_bytes"] * 8
        reasons, number = set(), 0
        while decisions := (await server.get(f"/admin/v1/decisions?after={number}&limit=1000"))["data"]:
            reasons |= {d["reason"] for d in decisions if d["controller"] == "expert_residency"}
            number = decisions[-1]["number"]
        assert "evicted" in reasons
        text = (await server.client.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def value(name: str, **labels: str) -> float:
        return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    assert value("moe_resident_experts") == 6
    assert value("moe_expert_bytes", memory="host") == found["host_bytes"]
    assert value("moe_expert_rows_total", expert="asleep") >= found["asleep_rows"]
    assert value("moe_expert_fetches_total", kind="late") > 0
    assert value("moe_expert_fetches_total", kind="ahead_used") > 0
    assert value("moe_expert_residency_changes_total", reason="evicted") == found["changes"]["evicted"]
