"""The tiny real engine behind the real application, in process, and a load that counts what goes wrong."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from control_plane.app import create_app
from control_plane.engine_handle import ServedModel
from control_plane.finding import SnapshotHistory
from control_plane.service import EngineService
from runtime.config import parse_config
from runtime.engine.build import ModelCard
from runtime.engine.change import LadderState
from runtime.engine.chat_template import ChatTemplate
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.loop import EngineLoop
from runtime.engine.tokenizer import ByteTokenizer
from tests.patience import until_async

CONFIG_PATH = "/admin/v1/config"
VOCAB_SIZE = 264
ROW_SLOTS = 6
CONFIG = parse_config(
    {
        "server": {"demo": True, "state_dir": "off"},
        "model": {"load_format": "dummy", "dtype": "fp32"},
        "kv_cache": {"kv_cache_size": "4MiB", "page_size": 4},
        "ladder": {
            "decode_rows": [1, 4],
            "prefill_tokens": [32],
            "max_prefill_rows": 4,
            "cache_dir": "off",
            "row_slots": ROW_SLOTS,
            "max_rungs": 6,
        },
        "batch_processing": {"max_batch_size": 4, "base_batch_size": 4, "enable_dynamic_batch": False},
        "slo": {"itl": "10s"},
    }
)


@dataclass(slots=True)
class LiveServer:
    """An operator's and everybody's client of one server."""

    client: httpx.AsyncClient
    loop: EngineLoop
    service: EngineService
    app: FastAPI

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def patch(self, patch: dict[str, Any], **body: Any) -> httpx.Response:
        """For whatever revision is current."""
        headers = {"If-Match": f'"{self.service.live.revision}"'}
        return await self.client.patch(CONFIG_PATH, json={"patch": patch, **body}, headers=headers)

    async def status(self, number: int) -> str:
        found = (await self.get(f"{CONFIG_PATH}/history"))["data"]
        return next(revision["status"] for revision in found if revision["number"] == number)

    async def ask(self, num_tokens: int, prompt: str = "once upon a time") -> str:
        """One stream's text. Raises AssertionError when it was refused, failed or cut off."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        *events, done = [
            line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data:")
        ]
        assert done == "[DONE]", answer.text
        choices = [choice for event in map(orjson.loads, events) for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length", answer.text
        return "".join(choice["text"] for choice in choices)

    def hits(self) -> dict[str, int]:
        return {rung.name: rung.hits for rung in self.loop.snapshot().rungs}

    def look_back(self) -> None:
        """Diagnosis sees a window from the engine as it is now, as if that had been a minute ago."""
        history = SnapshotHistory()
        history.add(time.monotonic() - 60, self.loop.snapshot())
        self.service.sampler.recent = history

    async def is_steady(self) -> None:
        """Waits until no rung compiles and LiveConfig has noted so."""
        await until_async(
            lambda: (
                self.loop.snapshot().ladder_change.state is not LadderState.COMPILING
                and self.service.live.newest.status != "compiling"
            )
        )


@asynccontextmanager
async def live_server(loop: EngineLoop) -> AsyncIterator[LiveServer]:
    """A server at its first revision, over an engine that is put back to CONFIG."""
    loop.configure(CONFIG).result(10)
    await until_async(lambda: loop.snapshot().ladder_change.state is LadderState.STEADY)
    service, tokenizer = EngineService(CONFIG), ByteTokenizer(VOCAB_SIZE)
    card = ModelCard("tiny", 256, VOCAB_SIZE, 0)
    grammars = GrammarCompiler(tokenizer, VOCAB_SIZE)
    service.attach(ServedModel(loop, tokenizer, card, ChatTemplate(None), grammars))
    app = create_app(service)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield LiveServer(client, loop, service, app)


class Load:
    """`num_streams` requests at any time until the block ends. `errors` holds what went wrong."""

    def __init__(self, server: LiveServer, num_streams: int, num_tokens: int = 24) -> None:
        self._server, self._num_streams, self._num_tokens = server, num_streams, num_tokens
        self._rng = random.Random(0)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.num_done = 0
        self.texts: dict[str, set[str]] = {}
        self.errors: list[str] = []

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._stream_on()) for _ in range(self._num_streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def more(self, num: int) -> None:
        """Waits for `num` more answers."""
        wanted = self.num_done + num
        await until_async(lambda: self.num_done >= wanted or bool(self.errors))

    async def _stream_on(self) -> None:
        while not self._is_over:
            prompt = "once upon a time, there was a king"[: self._rng.choice((3, 8, 34))]
            try:
                if self._rng.random() < 0.1:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._server.ask(200, prompt), 0.02)  # the client hangs up
                text = await self._server.ask(self._num_tokens, prompt)
            except AssertionError as error:
                self.errors.append(str(error)[:500])
                return
            self.texts.setdefault(prompt, set()).add(text)
            self.num_done += 1
