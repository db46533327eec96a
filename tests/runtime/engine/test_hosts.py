"""Two processes that are one engine: the text of one process, through moves and a new ladder; and the end of a host."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import EngineDriver, request
from tests.runtime.engine.two_hosts import MODEL, SECTIONS, TwoHosts

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(1 + 5 * i)] for i in range(6)]
SILENCE_S = 4.0
HOST_PATIENCE_S = 30.0  # of a busy machine, on top of what the configuration promises


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def silence_s() -> float:
    return 120.0


@pytest.fixture
def hosts(tmp_path, cache, silence_s) -> Iterator[TwoHosts]:
    found = TwoHosts(tmp_path, cache, silence_s)
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineDriver]:
    """One process with two devices."""
    driver = EngineDriver(arch=MODEL, **SECTIONS)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def expected(alone) -> list[list[int]]:
    return alone.run(request(f"r{i}", p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS))


def prompt_logprobs(driver: EngineDriver, prompt: list[int]) -> list[float | None]:
    driver.scheduler.clear_prefix_cache()
    driver.steps.clear()
    driver.run([request("scored", prompt, max_tokens=1, prompt_logprobs=1)])
    parts = [c.prompt_logprobs["scored"] for _, c in driver.steps if "scored" in c.prompt_logprobs]
    return [lp.logprob for part in parts for lp in part.logprobs]


def test_text_through_moves_and_a_new_ladder_until_a_host_dies(hosts, expected, alone) -> None:
    def ask_all() -> list[list[int]]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda p: hosts.ids(p, NUM_TOKENS), PROMPTS))

    assert ask_all() == expected
    assert [(h["host_id"], h["state"]) for h in hosts.get("/admin/v1/experts")["hosts"]] == [
        (0, "up"),
        (1, "up"),
    ]

    body = {
        "model": "tiny",
        "prompt": PROMPTS[3],
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    scored = hosts.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    assert scored[1 : len(PROMPTS[3])] == pytest.approx(prompt_logprobs(alone, PROMPTS[3]), abs=1e-5)

    def change(patch: dict[str, Any], revision: int) -> None:
        headers = {"If-Match": f'"{revision}"'}
        changed = hosts.client.patch("/admin/v1/config", json={"patch": patch}, headers=headers)
        assert changed.status_code < 300, changed.text

    # Experts move and a rung is added while requests run. Copies that level the devices would leave nothing to move.
    change({"batch_processing": {"expert_balance_weight": 0.0}}, 1)
    with ThreadPoolExecutor(1) as pool:
        texts, skewed = [pool.submit(ask_all)], []

        def has_moves() -> bool:
            """All prompts together may load both devices alike; one alone does not for long."""
            skewed.append(pool.submit(hosts.ids, PROMPTS[1], NUM_TOKENS))
            applied = hosts.client.post("/admin/v1/experts/rebalance", json={"reason": "test"})
            assert applied.status_code in (200, 422, 503), (
                applied.text
            )  # nothing seen yet, or no plan in time
            return applied.json().get("num_moves", 0) > 0

        hosts.wait(has_moves, 3 * HOST_PATIENCE_S)
        texts.append(pool.submit(ask_all))
        change({"ladder": {"decode_rows": [2, 4]}}, 2)
        assert all(text.result() == expected for text in texts)
        assert all(text.result() == expected[1] for text in skewed)
    hosts.wait(lambda: hosts.get("/admin/v1/experts")["experts"]["waiting_moves"] == 0, HOST_PATIENCE_S)
    hosts.wait(lambda: 'rung="decode-2-gather",state="ready"' in hosts.client.get("/metrics").text, 60)
    assert ask_all() == expected
    assert 'moe_late_compiles_total{engine="0",model_name="tiny"} 0.0' in hosts.client.get("/metrics").text

    # The other host is killed while requests run: it stands still before, or they might be over.
    with ThreadPoolExecutor(2) as pool:
        hosts.follower.send_signal(signal.SIGSTOP)
        answers = [pool.submit(hosts.complete, prompt, 200) for prompt in PROMPTS[:2]]
        time.sleep(0.5)
        hosts.follower.kill()
        start = time.monotonic()
        for answer in (a.result(2 * HOST_PATIENCE_S) for a in answers):
            assert answer.status_code == 503
            assert "host 1 of 2 (127.0.0.1:" in answer.text
            assert "is gone: connection closed" in answer.text
        assert time.monotonic() - start < 2 * HOST_PATIENCE_S  # not by silence
    check_the_survivor(hosts)


@pytest.mark.parametrize("silence_s", [SILENCE_S])
def test_a_host_that_hangs_is_noticed(hosts, silence_s) -> None:
    hosts.follower.send_signal(signal.SIGSTOP)
    try:
        answer = hosts.complete(PROMPTS[1], 200)
        assert answer.status_code == 503
        assert f"is gone: silent for {silence_s:g} s" in answer.text
        check_the_survivor(hosts)
    finally:
        hosts.follower.send_signal(signal.SIGCONT)
    assert hosts.follower.wait(HOST_PATIENCE_S) != 0
    assert "moe-ladder follower: host 0 is gone" in hosts.log("follower")


def check_the_survivor(hosts: TwoHosts) -> None:
    """The control plane answers, says which host is gone, takes nothing in, and ends when it is told to."""
    assert hosts.client.get("/health/live").status_code == 503
    assert hosts.get("/health/ready") == {"ready": False, "state": "failed", "lost_hosts": [1]}
    assert [h["state"] for h in hosts.get("/admin/v1/experts")["hosts"]] == ["up", "gone"]
    assert 'moe_host_up{engine="0",host="1",model_name="tiny"} 0.0' in hosts.client.get("/metrics").text
    hosts.wait(lambda: "host 1 of 2" in hosts.client.get("/admin/v1/console/overview").text, HOST_PATIENCE_S)
    refused = hosts.complete(PROMPTS[0], 4)
    assert refused.status_code == 503
    assert "host 1 of 2" in refused.text
    hosts.leader.terminate()
    hosts.leader.wait(HOST_PATIENCE_S)
