"""Experts moved over HTTP on the real, tiny engine on four devices, while it answers."""

from collections.abc import Iterator

import pytest

from runtime.config import parse_config
from runtime.engine.loop import EngineLoop
from runtime.ladder.late_compiles import monitor
from tests.control_plane.live_engine import CONFIG, Load, live_server
from tests.patience import until_async
from tests.runtime.engine.test_loop import make_loop

EXPERTS = "/admin/v1/experts"


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    data = CONFIG.model_dump(mode="json") | {"parallel": {"expert_parallel_size": 4, "redundant_experts": 4}}
    data["ladder"] |= {"decode_rows": [4], "prefill_tokens": [64]}
    loop = make_loop(parse_config(data))
    loop.start()
    loop.wait_complete(120)
    yield loop
    loop.shutdown()


async def test_an_operator_moves_experts_under_load(loop) -> None:
    async with live_server(loop) as server:
        before = await server.get(EXPERTS)
        assert (before["experts"]["num_devices"], before["experts"]["slots_per_device"]) == (4, 3)
        early = await server.client.post(f"{EXPERTS}/rebalance", json={"dry_run": True})
        assert early.status_code == 422
        assert "no traffic" in early.json()["error"]["message"]
        monitor.arm()
        async with Load(server, 4) as load:
            await load.more(8)
            await until_async(lambda: loop.snapshot().experts.imbalance is not None)
            plan = (await server.client.post(f"{EXPERTS}/rebalance", json={"dry_run": True})).json()
            assert plan["imbalance_after"] <= plan["imbalance_before"]
            assert plan["status"]["slot_experts"] == before["experts"]["slot_experts"]
            applied = await server.client.post(f"{EXPERTS}/rebalance", json={"reason": "evening"})
            assert applied.status_code == 200
            await until_async(lambda: loop.snapshot().experts.waiting_moves == 0)
            await load.more(8)
        assert not load.errors
        assert all(len(texts) == 1 for texts in load.texts.values())  # the same before and after
        now = (await server.get(EXPERTS))["experts"]
        assert now["applied_moves"] == applied.json()["num_moves"]
        assert sum(map(sum, now["device_rows"])) > 0
        assert loop.snapshot().late_compiles == 0
        line = next(e for e in (await server.get("/admin/v1/audit"))["data"] if e["event"] == "experts")
        assert (line["reason"], line["order"], line["result"]) == ("evening", {"rebalance": "apply"}, "done")


async def test_traffic_keys_of_requests_are_what_the_next_window_is_foreseen_from(loop) -> None:
    async with live_server(loop) as server:
        body = {
            "model": "tiny",
            "prompt": "some words",
            "max_tokens": 16,
            "metadata": {"traffic_key": "translation"},
        }

        def is_foreseen() -> bool:
            forecast = loop.snapshot().experts.forecast
            return forecast is not None and "translation" in forecast.next_traffic

        assert (await server.client.post("/v1/completions", json=body)).status_code == 200
        await until_async(is_foreseen)
        shown = (await server.get(EXPERTS))["experts"]["forecast"]
        assert shown["next_traffic"]["translation"] > 0
        assert shown["source"] in shown["errors"] or not shown["errors"]


async def test_pause_and_pin(loop) -> None:
    async with live_server(loop) as server:
        paused = await server.client.post(f"{EXPERTS}/pause", json={"paused": True})
        assert paused.json()["is_paused"]
        pinned = await server.client.post(f"{EXPERTS}/pin", json={"layers": [1, 0, 1]})
        assert pinned.json()["pinned_layers"] == [0, 1]
        plan = await server.client.post(f"{EXPERTS}/rebalance", json={"dry_run": True})
        assert plan.json()["num_moves"] == 0
        for body, field in (
            ({"layers": [2]}, "pinned_layers has 2; layers are 0 to 1"),
            ({"layers": [-1]}, "layers"),
            ({"layers": "all"}, "layers"),
            ({}, "layers"),
        ):
            refused = await server.client.post(f"{EXPERTS}/pin", json=body)
            assert refused.status_code == 422
            assert field in refused.text
        assert (await server.get(EXPERTS))["experts"]["pinned_layers"] == [0, 1]
        await server.client.post(f"{EXPERTS}/pin", json={"layers": []})
        await server.client.post(f"{EXPERTS}/pause", json={"paused": False})
