"""Leaving in order: not ready but still admitting, then no admission, then a bounded wait, then the rest is cancelled.

uvicorn alone closes its listener on SIGTERM and waits without bound; here the listener stays open until the end.
"""

import asyncio
import logging
import signal
from types import FrameType

import uvicorn

from control_plane.limits import BoundedHttpProtocol
from control_plane.service import EngineService

POLL_S = 0.05
LAST_WORDS_S = 2  # for answers that are being written when everything has been cancelled
log = logging.getLogger(__name__)


async def drain(service: EngineService, delay_s: float, timeout_s: float) -> None:
    """Returns when every call has ended, one way or the other."""
    log.info("draining: not ready, still admitting for %g s", delay_s)
    service.leave()
    await asyncio.sleep(delay_s)
    log.info(
        "draining: admission closed, %d requests in flight, waiting up to %g s", service.num_open, timeout_s
    )
    service.close_admission()
    if not await _until_empty(service, timeout_s):
        log.warning("draining: cancelling %d requests", service.num_open)
        service.cancel_all()
        await _until_empty(service, LAST_WORDS_S)


async def _until_empty(service: EngineService, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while service.num_open:
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    return True


class DrainingServer(uvicorn.Server):
    """uvicorn with a drain before its shutdown. The first signal drains, the second ends at once."""

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler. uvicorn would raise the signal again at the end; a drained server exits with 0 instead."""
        if self._event_loop is None or self._drain is not None:
            self.should_exit = self.force_exit = True
        else:
            self._event_loop.call_soon_threadsafe(self.start_drain, signal.Signals(sig).name)

    def start_drain(self, reason: str) -> None:
        if self._drain is None:
            log.info("%s received", reason)
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        server = self._service.config.server
        try:
            await drain(self._service, server.drain_delay, server.drain_timeout)
        finally:
            self.should_exit = True


def uvicorn_config(app: object, service: EngineService) -> uvicorn.Config:
    server = service.config.server
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=server.host,
        port=server.port,
        http=BoundedHttpProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
