"""Random requests, cancels, disconnects and bad bodies against a server; then hostile clients beside honest streams.

    python tests/conformance/storm.py                                the fake engine
    python tests/conformance/storm.py --model "" --num 1000          the embedded model; or a model folder

Fails when an answer is a 5xx, a request or page is left behind, a late compile is counted, or the 99th percentile of
the time between tokens of honest streams more than doubles beside hostile clients.
"""

import argparse
import asyncio
import random
import re
import socket
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import orjson

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance.server import served_model

BAD = (
    b"", b"{", b"[]", b"null", b'{"model":"storm"}', b'{"model":"storm","prompt":"a","temperature":NaN}',
    b'{"model":"storm","prompt":"a","n":1000000000}', b'{"model":"storm","prompt":"a","temperature":1e999}',
    b'{"model":"storm","prompt":{"a":[1]}}', b'{"model":"none","prompt":"a"}', b'{"model":"storm","prompt":[-1]}',
    b'{"model":"storm","prompt":"a","max_tokens":1e30}', b"[" * 5000, b"\xff\x00",
    b'{"model":"storm","prompt":"\\ud800"}', b'{"model":"storm","prompt":"a","logit_bias":{"x":1}}',
)  # fmt: skip
JSON = {"Content-Type": "application/json"}
WORDS = [
    "the",
    "a",
    "house",
    "of",
    "and",
    "in",
    "ship",
    "sea",
    "old",
    "king",
    "said",
    "never",
    "upon",
    "time",
    "door",
    "light",
]


async def storm(base_url: str, num: int, concurrency: int, seed: int) -> Counter[str]:
    """Kinds of end, by count."""
    ends: Counter[str] = Counter()
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:

        async def one(i: int) -> None:
            async with gate:
                ends[await _one(client, random.Random(seed * 1_000_003 + i))] += 1

        await asyncio.gather(*(one(i) for i in range(num)))
    return ends


async def _one(client: httpx.AsyncClient, rng: random.Random) -> str:
    """A random request. Returns its status, and how it was left if it was."""
    path = rng.choice(["/completions", "/chat/completions"])
    if rng.random() < 0.2:
        answer = await client.post(path, content=rng.choice(BAD), headers=JSON)
        return f"bad body: {answer.status_code}"
    body = _body(rng, path)
    if not body.get("stream"):
        task = asyncio.ensure_future(client.post(path, json=body))
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.2)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return "whole: left"
        return f"whole: {(await task).status_code}"
    leaves_after = rng.randrange(20) if rng.random() < 0.4 else None
    async with client.stream("POST", path, json=body) as answer:
        num, last = 0, ""
        async for line in answer.aiter_lines():
            num, last = num + 1, line or last
            if num == leaves_after:
                return "stream: left"
    if answer.status_code == 200 and last != "data: [DONE]":
        return "stream: 599 (no end)"
    return f"stream: {answer.status_code}"


def _body(rng: random.Random, path: str) -> dict[str, Any]:
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
    source = {"prompt": text} if path == "/completions" else {"messages": [{"role": "user", "content": text}]}
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1, 2]), "top_p": rng.random(), "top_k": rng.randrange(-1, 50),
        "min_p": rng.random() / 4, "n": rng.randrange(1, 4), "seed": rng.randrange(-(1 << 63), 1 << 63),
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2), "ignore_eos": True,
        "repetition_penalty": rng.uniform(0.5, 2), "stop": rng.choices(["e", "the", "\n", "ab"], k=2),
        "logit_bias": {str(rng.randrange(200)): rng.uniform(-100, 100)}, "priority": rng.randrange(-5, 5),
        "cache_salt": rng.choice("ab"), "stop_token_ids": [rng.randrange(200)], "min_tokens": 1,
        "logprobs": rng.randrange(5) if path == "/completions" else True, "unknown": 1,
    }  # fmt: skip
    chosen = {key: value for key, value in options.items() if rng.random() < 0.25}
    if rng.random() < 0.05:
        chosen["response_format"] = {"type": "json_object"}
    return (
        {"model": "storm", "max_tokens": rng.randrange(1, 80), "stream": rng.random() < 0.5} | source | chosen
    )


async def after(base_url: str, timeout_s: float = 30) -> dict[str, float]:
    """Metrics once the engine is idle; the first look may be too early."""
    root = base_url.removesuffix("/v1")
    end = time.monotonic() + timeout_s
    async with httpx.AsyncClient() as client:
        while True:
            text = (await client.get(f"{root}/metrics")).text
            found = {
                name: sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
                for name in (
                    "vllm:num_requests_running",
                    "vllm:num_requests_waiting",
                    "vllm:kv_cache_usage_perc",
                    "moe_late_compiles_total",
                    "process_resident_memory_bytes",
                )
            }
            if not any(list(found.values())[:3]) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.2)


async def until_compiled(base_url: str, timeout_s: float = 300) -> None:
    """Rungs that still compile take processor time and memory which are not the requests'."""
    end = time.monotonic() + timeout_s
    async with httpx.AsyncClient() as client:
        while time.monotonic() < end:
            text = (await client.get(f"{base_url.removesuffix('/v1')}/metrics")).text
            if not re.search(r'^moe_rung_state{.*state="compiling"', text, re.MULTILINE):
                return
            await asyncio.sleep(0.5)


async def honest_p99_s(base_url: str, num_streams: int = 4, num_tokens: int = 150) -> float:
    """99th percentile of the time between chunks of some streams."""
    gaps: list[float] = []

    async def one(client: httpx.AsyncClient) -> None:
        body = {
            "model": "storm",
            "prompt": "Once",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", "/completions", json=body) as answer:
            last = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now

    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:
        for _ in range(3):
            await asyncio.gather(*(one(client) for _ in range(num_streams)))
    return sorted(gaps)[int(0.99 * len(gaps))]


async def beside_hostile(base_url: str) -> tuple[float, float, Counter[int]]:
    """p99 alone, p99 beside hostile clients, and the statuses that those got."""
    alone = await honest_p99_s(base_url)
    stop = asyncio.Event()
    statuses: Counter[int] = Counter()
    tasks = [asyncio.ensure_future(_slow_reader(base_url, stop)) for _ in range(2)]
    tasks.append(asyncio.ensure_future(_large_bodies(base_url, stop, statuses)))
    beside = await honest_p99_s(base_url)
    stop.set()
    await asyncio.gather(*tasks)
    return alone, beside, statuses


async def _slow_reader(base_url: str, stop: asyncio.Event) -> None:
    """Asks for a stream and reads one byte a second."""
    url = httpx.URL(base_url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (url.host, url.port))
    body = orjson.dumps(
        {"model": "storm", "prompt": "Once", "max_tokens": 500, "stream": True, "ignore_eos": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + body)
    while not stop.is_set():
        await loop.sock_recv(connection, 1)
        await asyncio.sleep(1)
    connection.close()


async def _large_bodies(base_url: str, stop: asyncio.Event, statuses: Counter[int]) -> None:
    bodies = [
        b"x" * 40_000_000,
        orjson.dumps({"model": "storm", "prompt": "word " * 200_000}),
        orjson.dumps({"model": "storm", "prompt": [1] * 200_000}),
    ]
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        while not stop.is_set():
            for body in bodies:
                statuses[(await client.post("/completions", content=body, headers=JSON)).status_code] += 1
                await asyncio.sleep(0.5)


async def run(base_url: str, num: int, concurrency: int, seed: int) -> int:
    await until_compiled(base_url)
    await storm(base_url, num // 4, concurrency, seed)  # warm: buffers and caches take their size
    before = await after(base_url)
    start = time.monotonic()
    ends = await storm(base_url, num, concurrency, seed + 1)
    idle = await after(base_url)
    print(f"{num} requests in {time.monotonic() - start:.1f} s")
    for end, count in sorted(ends.items()):
        print(f"  {end:24}{count:6}")
    grown = (idle["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]) / 2**20
    print(f"left behind: {list(idle.values())[:3]}, late compiles {idle['moe_late_compiles_total']:.0f}")
    print(f"resident memory grew by {grown:.1f} MiB")
    alone, beside, statuses = await beside_hostile(base_url)
    print(
        f"p99 between chunks: {1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms beside hostile clients {dict(statuses)}"
    )
    is_bad = (
        any(re.search(r": 5\d\d", end) for end in ends) or any(list(idle.values())[:4]) or beside > 2 * alone
    )
    return 1 if is_bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server with the model or alias `storm`, with /v1")
    parser.add_argument("--model", help="model folder for a real server; empty: the embedded model")
    parser.add_argument("--config", type=Path, help="configuration of the real server")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = (
        nullcontext(args.base_url) if args.base_url else served_model(args.model, ["storm"], args.config)
    )
    with started as base_url:
        return asyncio.run(run(base_url, args.num, args.concurrency, args.seed))


if __name__ == "__main__":
    sys.exit(main())
