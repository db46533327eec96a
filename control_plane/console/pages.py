"""ConsolePages: each page made and serialised at most once a tick, and then the same bytes for every viewer.

Facts are gathered on the event loop's thread, in which their owners live; arithmetic and JSON are done in a worker's.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from control_plane.config_store import KEPT_REVISIONS
from control_plane.console import parts
from control_plane.console.alerts import AlertBook, Standing, judge
from control_plane.console.economics import economics
from control_plane.console.overview import overview
from control_plane.console.prices import NO_PRICES, PriceBook, PriceRevision, price_book
from control_plane.console.view import View, envelope
from control_plane.diagnosis import diagnose
from control_plane.errors import clean
from control_plane.finding import MIN_WINDOW_S, Finding
from control_plane.live_config import LiveConfig
from control_plane.service import EngineService
from runtime.config import EconomicsConfig, parse_config

RECENT_S = 10.0
RECENT_EXPERTS_S = 30.0
DIAGNOSE_EVERY_S = 5.0
AUDIT_LINES = 100
log = logging.getLogger(__name__)
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def _diagnosis(view: View) -> dict[str, Any]:
    return envelope(view) | {
        "window_s": view.window_s,
        "min_window_s": MIN_WINDOW_S,
        "findings": [{"id": finding.id} | asdict(finding) for finding in view.findings],
    }


def _audit(view: View) -> dict[str, Any]:
    entries = view.audit
    before = entries[-1]["number"] if len(entries) == AUDIT_LINES and entries[-1]["number"] > 1 else None
    return envelope(view) | {"entries": entries, "before": before}


BUILDERS: dict[str, Callable[[View], dict[str, Any]]] = {
    "overview": overview,
    "buckets": parts.buckets,
    "experts": parts.experts,
    "kv": parts.kv,
    "scaling": parts.scaling,
    "economics": economics,
    "diagnosis": _diagnosis,
    "audit": _audit,
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A page as bytes. key: the tick and revision that it was made for."""

    key: tuple[int, int | None]
    etag: str
    body: bytes


class ConsolePages:
    """One for a server. num_rendered counts pages that were made, whoever asked."""

    def __init__(
        self,
        service: EngineService,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._service, self._clock, self._wall_clock = service, clock, wall_clock
        self._boot = secrets.token_hex(4)  # pages of another process are other pages
        self._rendered: dict[tuple[str, str], Rendered] = {}
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._alerts = AlertBook()
        self._diagnosing = asyncio.Lock()
        self._findings: tuple[tuple[Finding, ...], float | None] = ((), None)
        self._diagnosed_s: float | None = None
        self._book: tuple[int, PriceBook] = (0, NO_PRICES)
        self.num_rendered = 0

    async def page(self, page: str, span: str) -> Rendered:
        """page, span: of console_schemas, checked."""
        name, key = (page, span), self._key()
        found = self._rendered.get(name)
        if found is not None and found.key == key:
            return found
        async with self._locks[name]:
            key = self._key()
            found = self._rendered.get(name)
            if found is None or found.key != key:
                view = await self._gather(page, span)
                body = await asyncio.to_thread(_render, view)
                etag = f'"{self._boot}-{page}-{span}-{key[0]}-{key[1] or 0}"'
                found = self._rendered[name] = Rendered(key, etag, body)
                self.num_rendered += 1
            return found

    def _key(self) -> tuple[int, int | None]:
        live = self._service.live_config
        return self._service.sampler.num_ticks, live.revision if live else None

    async def _gather(self, page: str, span: str) -> View:
        service, sampler = self._service, self._service.sampler
        live, snapshot, now_s = service.live_config, sampler.snapshot, self._wall_clock()
        config = live.effective if live else service.config
        history = sampler.history
        more: dict[str, Any] = {}
        if page in ("overview", "audit") and live is not None:
            more["audit"] = tuple(await asyncio.to_thread(live.audit.page, None, AUDIT_LINES))
        if page in ("overview", "diagnosis") and live is not None:
            more["findings"], more["window_s"] = await self._diagnose(live)
        if page == "overview":
            more["alerts"] = self._judged(live, more.get("findings", ()), now_s)
            more["recent"] = history.recent(RECENT_S, now_s)
        if page == "buckets":
            more |= {"moves": tuple(sampler.moves), "reasons": sampler.reasons}
        if page == "experts":
            more |= {"experts": history.experts(span, now_s), "devices": sampler.devices.figures()}
            more["recent_experts"] = history.recent_experts(RECENT_EXPERTS_S, now_s)
        if page == "economics":
            more |= {"day": history.points("24h", now_s), "prices": await self._prices(live)}
        error = service.load_error or (snapshot.error if snapshot else "")
        return View(
            page=page,
            span=span,
            now_s=now_s,
            data_age_s=sampler.data_age_s(),
            state=service.readiness()[1],
            error=clean(error) if error else "",
            model=service.loaded_name,
            revision=live.revision if live else None,
            config=config,
            snapshot=snapshot,
            points=history.points(span, now_s),
            num_open_calls=service.num_open,
            **more,
        )

    def _judged(self, live: LiveConfig | None, findings: tuple[Finding, ...], now_s: float) -> Any:
        service, sampler = self._service, self._service.sampler
        standing = Standing(
            snapshot=sampler.snapshot,
            data_age_s=sampler.data_age_s(),
            is_alive=service.is_alive(),
            load_error=service.load_error,
            config=live.effective if live else service.config,
            points=sampler.history.points("15min", now_s),
            findings=findings,
            trial=live.trial.revision if live and live.trial else None,
            pending_restart=live.pending_restart if live else (),
            problem=clean(live.newest.error) if live and live.newest.error else "",
        )
        return self._alerts.dated(judge(standing), now_s)

    async def _diagnose(self, live: LiveConfig) -> tuple[tuple[Finding, ...], float | None]:
        """Judged anew every DIAGNOSE_EVERY_S, for both pages that show it."""
        async with self._diagnosing:
            now_s = self._clock()
            if self._diagnosed_s is None or now_s - self._diagnosed_s >= DIAGNOSE_EVERY_S:
                self._diagnosed_s = now_s
                window = self._service.sampler.recent.window()
                try:
                    found = await asyncio.to_thread(diagnose, window, live.effective) if window else ()
                except Exception:  # a rule's mistake must not take the overview away
                    log.exception("diagnosis failed")
                    return self._findings
                self._findings = found, window.seconds if window is not None else None
            return self._findings

    async def _prices(self, live: LiveConfig | None) -> PriceBook:
        """Rebuilt when there is a new revision."""
        if live is None:
            return NO_PRICES
        if self._book[0] != live.revision:
            number = live.revision
            self._book = number, await asyncio.to_thread(_book, live)
        return self._book[1]


def _render(view: View) -> bytes:
    return orjson.dumps(BUILDERS[view.page](view), option=_JSON)


def _book(live: LiveConfig) -> PriceBook:
    revisions = reversed(live.history(None, KEPT_REVISIONS))
    return price_book([PriceRevision(r.number, r.time_s, _economics(live.document_of(r))) for r in revisions])


def _economics(document: dict[str, Any]) -> EconomicsConfig:
    """The prices of a document. One that does not fit this version any more has none."""
    try:
        return parse_config({"economics": document.get("economics", {})}).economics
    except ValueError:
        return EconomicsConfig()
