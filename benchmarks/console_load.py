"""A recorded trace replayed over HTTP against a running server, until it is told to stop. For the console's pictures."""

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Self

import httpx

from runtime.bench.traces import TraceRequest

MAX_OPEN = 64  # requests at any time; more are skipped, as a gateway in front would refuse them
SHARED_PREFIX_LEN = 48  # tokens that a third of the requests begin with
FIRST_ID, LAST_ID = 300, 4000


class Load:
    """An open loop in a thread: arrivals as recorded, stretched to `rate` requests a second, over and over."""

    def __init__(self, server: str, requests: Sequence[TraceRequest], rate: float, seed: int = 0) -> None:
        self._server, self._requests, self._rng = server, requests, random.Random(seed)
        recorded_s = requests[-1].t_s - requests[0].t_s
        self._stretch = len(requests) / rate / recorded_s if recorded_s > 0 else 1.0
        self._prefix = self._ids(SHARED_PREFIX_LEN)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play()), daemon=True)
        self.num_sent = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(30)

    async def _play(self) -> None:
        open_calls: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=MAX_OPEN)
        async with httpx.AsyncClient(base_url=self._server, timeout=60, limits=limits) as client:
            while not self._stopped.is_set():
                begin_s = asyncio.get_running_loop().time()
                for request in self._requests:
                    due_s = begin_s + (request.t_s - self._requests[0].t_s) * self._stretch
                    while (wait_s := due_s - asyncio.get_running_loop().time()) > 0:
                        await asyncio.sleep(min(wait_s, 0.5))
                        if self._stopped.is_set():
                            break
                    if self._stopped.is_set():
                        break
                    if len(open_calls) < MAX_OPEN:
                        task = asyncio.create_task(self._send(client, request))
                        open_calls.add(task)
                        task.add_done_callback(open_calls.discard)
            for task in open_calls:
                task.cancel()
            await asyncio.gather(*open_calls, return_exceptions=True)

    async def _send(self, client: httpx.AsyncClient, request: TraceRequest) -> None:
        """One completion, streamed; what goes wrong is the server's to count."""
        ids = self._ids(request.prompt_len)
        if self._rng.random() < 1 / 3:
            ids = [*self._prefix, *ids]
        body = {
            "model": "demo-moe", "prompt": ids, "max_tokens": request.output_len, "stream": True, "temperature": 0.8,
        }  # fmt: skip
        self.num_sent += 1
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass
        except httpx.HTTPError:
            return

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
