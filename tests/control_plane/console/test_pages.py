"""Pages over HTTP: each fits its wire type, and ten viewers cost the server what one costs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from control_plane.app import create_app
from control_plane.console.history import TICK_S
from control_plane.console.pages import ConsolePages
from control_plane.console.sampler import Sampler
from control_plane.console_schemas import PAGE_TYPES, PAGES, SPANS
from control_plane.service import EngineService
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.stats import Histogram, PhaseTotals, PromiseTotals
from runtime.schedule.policy import SchedulePolicy
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine
from tests.control_plane.ladders import LadderEngine, Operated, operated

URL = "/admin/v1/console"
START_S = 1_800_000_000.0


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return START_S + self.now_s


@dataclass
class Watched:
    """A server whose console's clock the test moves."""

    server: Operated
    clock: Clock
    pages: ConsolePages

    async def get(self, page: str, span: str = "15min", **headers: str) -> httpx.Response:
        return await self.server.client.get(f"{URL}/{page}", params={"span": span}, headers=headers)

    def tick(self, **facts: Any) -> None:
        self.clock.now_s += TICK_S
        self.server.engine.now = replace(self.server.engine.now, taken_s=self.clock.now_s, **facts)
        self.server.service.sampler.tick(self.server.engine)


@asynccontextmanager
async def watched(sections: dict[str, Any] | None = None) -> AsyncIterator[Watched]:
    async with operated(sections) as server:
        clock = Clock()
        server.service.sampler = Sampler(clock, clock.wall)
        server.service._tasks[1].cancel()  # the test ticks
        server.app.state.console = ConsolePages(server.service, clock, clock.wall)
        yield Watched(server, clock, server.app.state.console)


def busy(i: int) -> dict[str, Any]:
    """What an engine says after `i` ticks of work."""
    ttft = Histogram((0.1, 1.0), [3 * i, i, 0])
    return {
        "uptime_s": TICK_S * i, "generation_tokens": 100 * i, "prompt_tokens": 60 * i, "cached_prompt_tokens": 20 * i,
        "busy_s": 0.5 * i, "num_running": 3, "num_waiting": i % 3, "used_pages": 20, "cached_pages": 5,
        "page_bytes": 4096, "prefix_queries": 60 * i, "prefix_hits": 20 * i, "ttft_s": ttft, "finished": {"stop": 4 * i},
        "phases": {"prefill": PhaseTotals(40 * i, 64 * i, 0.2 * i), "decode": PhaseTotals(100 * i, 120 * i, 0.3 * i)},
        "promises": PromiseTotals(4 * i, 3 * i, i, 0), "expert_tokens": ((9 * i, 3 * i, 0), (4 * i, 4 * i, 4 * i)),
        "policy": SchedulePolicy(batch_size=8, micro_batch_size=4),
    }  # fmt: skip


def assert_known(found: Any, dumped: Any, where: str) -> None:
    """Every key that the server sent is a field of the wire type: none was ignored."""
    if isinstance(found, dict):
        assert set(found) <= set(dumped), f"{where}: {set(found) - set(dumped)}"
        for key in found:
            assert_known(found[key], dumped[key], f"{where}.{key}")
    elif isinstance(found, list):
        for a, b in zip(found, dumped, strict=True):
            assert_known(a, b, f"{where}[]")


def of_type(page: str, answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    found = PAGE_TYPES[page].model_validate_json(answer.content)
    assert_known(answer.json(), found.model_dump(mode="json"), page)
    for plot in found.series:
        assert len(plot.values) == len(found.times) <= 500, plot.name
        assert len(plot.low) in (0, len(found.times))
    return found


async def test_every_page_and_span_fits_its_type_full_and_empty() -> None:
    async with watched() as server:
        for page in PAGES:
            of_type(page, await server.get(page))  # nothing has been sampled
        for i in range(1, 40):
            server.tick(**busy(i))
        for page in PAGES:
            for span in SPANS:
                found = of_type(page, await server.get(page, span))
                assert (found.page, found.span, found.version, found.state) == (page, span, 1, "ready")
                assert found.server_time == server.clock.wall()
                assert found.data_age_s == 0.0


async def test_a_loading_server_says_so_on_every_page() -> None:
    service = EngineService(make_config(demo=True))
    app = create_app(service)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for page in PAGES:
                found = of_type(page, await client.get(f"{URL}/{page}"))
                assert (found.state, found.version, found.data_age_s) == ("loading", None, None)
            service.fail_to_load("no such file /secret/place/model")
            app.state.console = ConsolePages(service)
            found = of_type("overview", await client.get(f"{URL}/overview"))
            assert (found.state, found.alerts[0].id) == ("failed", "load_failed")
            assert "secret" not in found.model_dump_json()


async def test_ten_viewers_cost_what_one_costs(engine: FakeEngine) -> None:
    process = in_process(engine, make_config(demo=True), "http://127.0.0.1")
    async with process as client:
        console: ConsolePages = client._transport.app.state.console  # type: ignore[attr-defined]
        clock = Clock()
        service, work = process.service, []
        service.sampler = Sampler(clock, clock.wall)
        for task in service._tasks:
            task.cancel()
        for num_viewers in (1, 10):
            before = engine.num_snapshots, console.num_rendered
            for _ in range(3):
                clock.now_s += TICK_S
                service.sampler.tick(engine)
                looked = engine.num_snapshots
                answers = await asyncio.gather(
                    *(client.get(f"{URL}/{page}") for page in PAGES for _ in range(num_viewers))
                )
                # Readiness and liveness read the engine's last word while a page is made, not for each viewer.
                looked = engine.num_snapshots - looked
                assert {a.status_code for a in answers} == {200}
                assert (
                    len({a.headers["etag"] for a in answers})
                    == len({a.content for a in answers})
                    == len(PAGES)
                )
            work.append((engine.num_snapshots - before[0], console.num_rendered - before[1], looked))
        assert work[0] == work[1]
        assert work[0][1] == 3 * len(PAGES)


async def test_a_page_is_the_same_until_the_next_tick_or_revision() -> None:
    async with watched() as server:
        server.tick(**busy(1))
        first = await server.get("overview")
        etag = first.headers["etag"]
        same = await server.get("overview", **{"If-None-Match": etag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
        assert (await server.get("overview", "3h", **{"If-None-Match": etag})).status_code == 200
        patch = {"patch": {"slo": {"ttft": "3s"}}}
        headers = {"If-Match": '"1"'}
        assert (
            await server.server.client.patch("/admin/v1/config", json=patch, headers=headers)
        ).status_code == 200
        changed = await server.get("overview", **{"If-None-Match": etag})
        found = of_type("overview", changed)
        assert (found.version, found.promises.ttft_s) == (2, 3.0)
        assert (found.recent_changes[0].revision, found.recent_changes[0].event) == (2, "change")
        assert found.recent_changes[0].changes == [
            {"path": "slo.ttft", "kind": "live", "old": "2s", "new": "3s"}
        ]
        server.tick(**busy(2))
        assert (await server.get("overview", **{"If-None-Match": changed.headers["etag"]})).status_code == 200


@pytest.mark.parametrize(
    "path", ["overview?span=1h", "overview?span=", "kv?span=15min%00", "kv?span=3h&span=1d"]
)
async def test_another_span_is_refused_with_those_that_are_allowed(path: str) -> None:
    async with operated() as server:
        answer = await server.client.get(f"{URL}/{path}")
        assert answer.status_code == 400
        assert all(span in answer.json()["error"]["message"] for span in SPANS)


@pytest.mark.parametrize("page", ["none", "Overview", "overview%2F..", "a" * 500])
async def test_another_page_is_not_found(page: str) -> None:
    async with operated() as server:
        answer = await server.client.get(f"{URL}/{page}")
        assert answer.status_code == 404
        assert len(answer.text) < 500


async def test_the_overviews_numbers() -> None:
    async with watched({"slo": {"itl": "50ms"}}) as server:
        for i in range(31):
            server.tick(**busy(i))
        found = of_type("overview", await server.get("overview"))
        assert (found.promises.num_requests, found.promises.attainment, found.promises.goodput_s) == (
            120,
            0.75,
            1.5,
        )
        assert found.promises.itl_s == 0.05
        assert found.now.generation_tokens_s == 50.0
        assert found.now.prompt_tokens_s == 20.0
        assert found.now.busy_share == 0.25
        ttft = next(p for p in found.percentiles if p.name == "ttft")
        assert (ttft.num_seen, ttft.p50_s) == (120, pytest.approx(0.1 * 60 / 90))
        plots = {plot.name: plot for plot in found.series}
        assert plots["goodput"].values[-1] == 1.5
        assert (plots["waiting"].low[-1], plots["waiting"].high[-1]) == (0, 0)
        assert [alert.id for alert in found.alerts] == ["slo"]
        since = found.alerts[0].since
        server.tick(**busy(31))
        assert of_type("overview", await server.get("overview")).alerts[0].since == since


async def test_now_is_the_last_seconds_and_not_the_span() -> None:
    async with watched() as server:
        for i in range(100):
            server.tick(**busy(i))
        for _ in range(10):  # nothing has been made for 20 s
            server.tick(**busy(99))
        now = of_type("overview", await server.get("overview")).now
        assert (now.generation_tokens_s, now.busy_share) == (0.0, 0.0)


async def test_the_rungs_and_why_numbers_moved() -> None:
    async with watched() as server:
        engine = server.server.engine
        rungs = engine.now.rungs
        used = replace(rungs[0], hits=9, real_tokens=60, computed_tokens=90, busy_s=1.0)
        server.tick(rungs=rungs)
        change = LadderChange(1, LadderState.COMPILING, ("decode-3",), ())
        server.tick(rungs=(used, *rungs[1:]), ladder_change=change)
        server.tick(ladder_change=replace(change, state=LadderState.FAILED, error="decode-3: too large"))
        found = of_type("buckets", await server.get("buckets"))
        row = found.rungs[0]
        assert (row.hits_span, row.computed_span, row.padding_span, row.occupancy) == (
            9,
            90,
            30,
            pytest.approx(2 / 3),
        )
        assert row.busy_share_span == pytest.approx(0.25)
        assert [move.reason for move in found.moves] == ["failed: decode-3: too large", "compiling"]
        assert found.ladder.error == "decode-3: too large"
        hits = [plot for plot in found.series if plot.name == "rung_hits"]
        assert [(plot.label, plot.values) for plot in hits] == [(row.name, [4.5, 0.0])]


async def test_decisions_that_moved_a_number_are_told_once_with_their_time(engine: FakeEngine) -> None:
    clock = Clock()
    sampler = Sampler(clock, clock.wall)
    log = engine.configuration.decisions
    for i in range(2500):
        value = 8.0 if i == 2400 else 4.0
        log.add(990.0, "batch_size", 4.0, value, "load_is_low" if value == 8 else "hold", {"load": 0.1})
    for _ in range(3):
        clock.now_s += TICK_S
        sampler.tick(engine)
    (move,) = sampler.moves
    assert (move.number, move.value, move.time_s) == (2401, 8.0, START_S + 990.0)
    assert sampler.reasons[("batch_size", "hold")] == 2499


async def test_the_experts_matrix_is_of_the_window() -> None:
    async with watched() as server:
        for i in range(10, 41):
            server.tick(**busy(i))
        found = of_type("experts", await server.get("experts"))
        assert (found.num_layers, found.num_experts) == (2, 3)
        ticks = round(found.window_s / TICK_S)
        assert found.tokens == [[9 * ticks, 3 * ticks, 0], [4 * ticks] * 3]
        assert found.imbalance == [2.25, 1.0]
        assert (found.num_idle, found.placement.available) == (1, False)
        assert found.step_s == 30.0


async def test_kv_and_what_is_not_there() -> None:
    async with watched() as server:
        for i in range(4):
            server.tick(**busy(i))
        found = of_type("kv", await server.get("kv"))
        device, host, shared = found.levels
        assert (device.available, device.capacity_bytes, device.used_bytes) == (True, 409_600, 81_920)
        assert device.hit_share == pytest.approx(1 / 3)
        assert not host.available and not shared.available and host.reason  # noqa: PT018
        found = of_type("scaling", await server.get("scaling"))
        assert not found.autoscaling.available
        assert found.autoscaling.reason


async def test_prices_are_live_and_the_past_keeps_its_own() -> None:
    async with watched() as server:
        for i in range(300):
            server.tick(**busy(i))
        found = of_type("economics", await server.get("economics"))
        assert (found.ledger.available, found.price_now, found.prices) == (False, None, [])
        assert "economics." in found.ledger.reason
        assert found.ledger.total.output_tokens > 0
        assert found.ledger.total.idle_share == pytest.approx(0.75)
        assert found.example.total.margin == pytest.approx(5.45, rel=0.005)
        patch = {
            "economics": {"worker_price": 6.0, "output_price": 2.0, "effective_from": "2027-01-15T08:00:00Z"}
        }
        headers = {"If-Match": '"1"'}
        answer = await server.server.client.patch("/admin/v1/config", json={"patch": patch}, headers=headers)
        assert answer.status_code == 200, answer.text
        found = of_type("economics", await server.get("economics"))
        total = found.ledger.total
        assert found.ledger.available
        assert found.price_now.revision == 2
        assert total.cost_usd == pytest.approx(6.0 * total.worker_hours)
        assert total.income_usd == pytest.approx(2.0 * total.output_tokens / 1e6)
        decode = next(p for p in found.ledger.phases if p.phase == "decode")
        assert decode.usd_per_million_busy == pytest.approx(6 * 0.3 / 3600 / 100 * 1e6)
        assert decode.usd_per_million_loaded == pytest.approx(6 * 2.0 * 0.6 / 3600 / 100 * 1e6)
        plots = {plot.name: plot for plot in found.series}
        assert plots["cost"].values[-1] == pytest.approx(6.0)
        assert plots["income"].values[-1] == pytest.approx(2e-6 * 50 * 3600)


async def test_a_price_that_has_only_just_been_set_says_why_there_is_no_money_yet() -> None:
    async with watched() as server:
        for i in range(5):
            server.tick(**busy(i))
        server.clock.now_s += 1.0
        server.server.service.live._applier._wall_clock = server.clock.wall
        patch = {"patch": {"economics": {"worker_price": 6.0}}}
        answer = await server.server.client.patch("/admin/v1/config", json=patch, headers={"If-Match": '"1"'})
        assert answer.status_code == 200
        found = of_type("economics", await server.get("economics"))
        assert (found.ledger.available, found.price_now.worker_hour) == (False, 6.0)
        assert "since the price holds" in found.ledger.reason
        server.tick(**busy(5))
        found = of_type("economics", await server.get("economics"))
        assert found.ledger.available
        assert found.ledger.total.cost_usd == pytest.approx(
            6.0 * 2.0 / 3600
        )  # of an interval of three seconds
        assert 0 < found.ledger.total.priced_share < 1


async def test_diagnosis_is_judged_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    judge: Callable[..., Any] = __import__("control_plane.diagnosis", fromlist=["diagnose"]).diagnose
    monkeypatch.setattr("control_plane.console.pages.diagnose", lambda *args: calls.append(1) or judge(*args))
    async with watched() as server:
        for i in range(20):
            server.tick(**busy(i))
        for page in ("overview", "diagnosis"):
            for span in SPANS:
                await server.get(page, span)
        found = of_type("diagnosis", await server.get("diagnosis"))
        assert len(calls) == 1
        assert found.window_s == pytest.approx(TICK_S * 19)


async def test_a_rule_that_fails_leaves_the_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("control_plane.console.pages.diagnose", fail)
    async with watched() as server:
        for i in range(20):
            server.tick(**busy(i))
        assert of_type("diagnosis", await server.get("diagnosis")).findings == []
        assert of_type("overview", await server.get("overview")).now is not None


async def test_while_the_engine_loads_there_is_no_age() -> None:
    async with watched() as server:
        server.tick(state="loading")
        server.clock.now_s += 60
        server.tick(state="loading")
        found = of_type("overview", await server.get("overview"))
        assert (found.state, found.data_age_s, found.times) == ("loading", None, [])


async def test_an_engine_that_says_nothing_grows_old() -> None:
    async with watched() as server:
        server.tick(**busy(1))
        engine: LadderEngine = server.server.engine
        for _ in range(6):
            server.clock.now_s += TICK_S
            server.server.service.sampler.tick(engine)
        found = of_type("overview", await server.get("overview"))
        assert found.data_age_s == pytest.approx(12.0)
        assert "engine_silent" in [alert.id for alert in found.alerts]
