"""From a finding to the change that was applied, and what stands in the way."""

import time
from dataclasses import replace

from control_plane.finding import MIN_WINDOW_S, SnapshotHistory
from tests.control_plane.ladders import Operated, operated

DIAGNOSIS = "/admin/v1/diagnosis"


def look_back(server: Operated) -> None:
    """As if what is now had been so a minute ago."""
    history = SnapshotHistory()
    history.add(time.monotonic() - 60, server.engine.now)
    server.service.sampler.recent = history


async def test_the_server_samples_from_its_start():
    async with operated() as server:
        history = server.service.sampler.recent
        history.add(time.monotonic() + 60, server.engine.now)
        assert history.window() is not None


async def test_no_window_no_findings():
    async with operated() as server:
        server.engine.now = replace(server.engine.now, num_preemptions=3)
        shown = await server.get(DIAGNOSIS)
        assert shown == {"revision": 1, "window_s": None, "min_window_s": MIN_WINDOW_S, "findings": []}


async def test_from_finding_to_change():
    async with operated() as server:
        look_back(server)
        server.engine.now = replace(server.engine.now, num_preemptions=3)
        shown = await server.get(DIAGNOSIS)
        assert 60 <= shown["window_s"] < 70
        (finding,) = shown["findings"]
        assert (finding["id"], finding["severity"]) == ("memory_pressure:kv_pages", "critical")
        assert finding["patch"] == {"batch_processing": {"max_batch_size": 24}}

        answer = await server.post(f"{DIAGNOSIS}/{finding['id']}/apply", reason="too many rows")
        assert answer.status_code == 200
        assert answer.json()["revision"]["number"] == 2
        assert answer.json()["plan"]["fields"][0]["path"] == "batch_processing.max_batch_size"
        assert server.service.live.effective.batch_processing.max_batch_size == 24
        assert server.service.live.store.get(2).reason == "too many rows"


async def test_a_finding_without_a_patch_and_one_that_is_gone_cannot_be_applied():
    async with operated() as server:
        look_back(server)
        server.engine.now = replace(server.engine.now, busy_s=58.0, expert_tokens=((1000, 100),))
        answer = await server.post(f"{DIAGNOSIS}/expert_imbalance:experts/apply")
        assert answer.status_code == 422
        assert "one device" in answer.json()["error"]["message"]
        gone = await server.post(f"{DIAGNOSIS}/memory_pressure:kv_pages/apply")
        assert gone.status_code == 404
        assert server.service.live.revision == 1
        assert (await server.post(f"{DIAGNOSIS}/{'x' * 5000}/apply")).status_code == 404


async def test_a_canary_that_cannot_be_judged_changes_nothing():
    async with operated() as server:
        look_back(server)
        server.engine.now = replace(server.engine.now, num_preemptions=3)
        body = {"canary": {"guard_period": "10s", "metric": "e2e_p99"}}
        answer = await server.post(f"{DIAGNOSIS}/memory_pressure:kv_pages/apply", **body)
        assert answer.status_code == 422
        assert "min_requests" in answer.json()["error"]["message"]
        assert server.service.live.revision == 1


async def test_a_change_under_trial_stands_in_the_way():
    async with operated() as server:
        look_back(server)
        await server.service.live.tick()  # what the trial compares with begins here
        latencies = server.engine.now.e2e_s.copy()
        latencies.observe(0.2, 50)
        server.engine.now = replace(server.engine.now, e2e_s=latencies, num_preemptions=3)
        body = {"canary": {"guard_period": "10s", "metric": "e2e_p99"}}
        first = await server.post(f"{DIAGNOSIS}/memory_pressure:kv_pages/apply", **body)
        assert first.status_code == 200
        assert first.json()["revision"]["canary"]["spec"]["metric"] == "e2e_p99"
        server.engine.now = replace(server.engine.now, num_preemptions=9)
        second = await server.post(f"{DIAGNOSIS}/memory_pressure:kv_pages/apply")
        assert second.status_code == 423
