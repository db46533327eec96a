"""An engine that has the default ladder, says what it is told to say, and changes its ladder when the test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import httpx
from fastapi import FastAPI

from control_plane.app import create_app
from control_plane.engine_handle import ServedModel
from control_plane.routes import diagnosis, ladder
from control_plane.service import EngineService
from runtime.adaptive.decision import Decision
from runtime.config import EngineConfig, parse_config
from runtime.engine.change import Applied, ConfigChange, LadderChange, LadderState
from runtime.engine.reconfigure import Envelope, RungCost, plan_change
from runtime.engine.stats import LONG_BOUNDS_S, EngineSnapshot, Histogram, RungSnapshot
from runtime.engine.timelines import Timelines
from runtime.ladder.ladder import BucketLadder
from runtime.schedule.policy import SchedulePolicy
from tests.control_plane.fake_engine import ByteTokenizer, Card, PlainGrammars, PlainTemplate

MAX_CONTEXT = 2048


def rungs_of(config: EngineConfig) -> tuple[RungSnapshot, ...]:
    return tuple(
        RungSnapshot(b.name, b.phase.value, b.tokens, "ready", 1.0, False, 0, 0, 0, 0, 0.01)
        for b in BucketLadder.from_config(config, MAX_CONTEXT).rungs
    )


def snapshot_of(config: EngineConfig | None = None, **facts: Any) -> EngineSnapshot:
    """Of an engine that has done nothing, but for `facts`."""
    known = {
        "state": "ready", "error": "", "num_pages": 100, "page_size": 16, "finished": {}, "rejected": {},
        "rungs": rungs_of(config or parse_config({})), "expert_tokens": (),
        "ladder_change": LadderChange(0, LadderState.STEADY), "policy": SchedulePolicy(),
        "demand": {"prefill": {}, "decode": {}},
    }  # fmt: skip
    rest = {
        f.name: Histogram(LONG_BOUNDS_S) if f.type in (Histogram, "Histogram") else 0
        for f in fields(EngineSnapshot)
        if f.default is MISSING and f.default_factory is MISSING
    }
    return EngineSnapshot(**rest | known | facts)


class LadderEngine:
    """The part of an EngineHandle that is asked about configuration. Rungs compile when `finish` says so."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.now = snapshot_of(config)
        self.card = Card(max_context=MAX_CONTEXT)
        self.timelines = Timelines()

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        return ()

    def decision_counts(self) -> dict[tuple[str, str], int]:
        return {}

    def snapshot(self) -> EngineSnapshot:
        return self.now

    def set_publisher(self, publish: Callable[..., None]) -> None:
        """Nothing is published."""

    def plan(self, config: EngineConfig, must_start: bool = True) -> ConfigChange:
        ladder = BucketLadder.from_config(self.config, MAX_CONTEXT)
        envelope = Envelope(self.config.batch_processing.max_batch_size, 512, MAX_CONTEXT)
        return plan_change(self.config, config, ladder, envelope, lambda _: RungCost(2.0, 0))

    def configure(self, config: EngineConfig) -> Future[Applied]:
        plan = self.plan(config)
        self.config = config
        if plan.rungs_to_add or plan.rungs_to_drop:
            number = self.now.ladder_change.number + 1
            change = LadderChange(number, LadderState.COMPILING, plan.rungs_to_add, plan.rungs_to_drop)
            self.now = replace(self.now, ladder_change=change)
        done: Future[Applied] = Future()
        done.set_result(Applied(1, 0.01, self.now.ladder_change))
        return done

    def finish(self, error: str = "") -> None:
        """The rungs that were ordered are ready, or one has failed."""
        state = LadderState.FAILED if error else LadderState.STEADY
        change = replace(self.now.ladder_change, state=state, error=error)
        self.now = replace(self.now, ladder_change=change)
        if not error:
            self.now = replace(self.now, rungs=rungs_of(self.config))

    def ask_for(self, phase: str, size: int, steps: int) -> None:
        """Traffic: `steps` more steps of `size` positions."""
        sizes = dict(self.now.demand[phase])
        sizes[size] = sizes.get(size, 0) + steps
        self.now = replace(self.now, demand={**self.now.demand, phase: sizes})


@dataclass(slots=True)
class Operated:
    """A server on this machine and an operator's client of it."""

    client: httpx.AsyncClient
    engine: LadderEngine
    service: EngineService
    app: FastAPI

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@asynccontextmanager
async def operated(sections: dict[str, Any] | None = None) -> AsyncIterator[Operated]:
    config = parse_config({"server": {"demo": True, "state_dir": "off"}} | (sections or {}))
    engine, service = LadderEngine(config), EngineService(config)
    service.attach(ServedModel(engine, ByteTokenizer(), engine.card, PlainTemplate(), PlainGrammars()))
    app = create_app(service)
    for routes in (ladder, diagnosis):
        if routes.router.prefix not in app.openapi()["paths"]:
            app.include_router(routes.router)
            app.openapi_schema = None
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            await asyncio.sleep(0)  # the first sample
            yield Operated(client, engine, service, app)
