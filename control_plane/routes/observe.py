"""Health, metrics and version. Health answers from memory: it never enters the queue and needs no key."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response

from control_plane.errors import json_response
from control_plane.routes.context import Service

router = APIRouter(tags=["observe"])


@router.get("/health", response_class=Response, include_in_schema=False)
@router.get("/health/live", response_class=Response)
async def live(service: Service) -> Response:
    """503 only when the engine has failed or hangs; loading and draining are alive."""
    is_alive = service.is_alive()
    return json_response({"live": is_alive} | _lost_hosts(service), 200 if is_alive else 503)


@router.get("/health/ready", response_class=Response)
async def ready(service: Service) -> Response:
    """503 while new requests should go elsewhere: loading, draining, failed."""
    is_ready, state = service.readiness()
    return json_response({"ready": is_ready, "state": state} | _lost_hosts(service), 200 if is_ready else 503)


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Prometheus text. A plain function: it runs in a worker thread, away from the event loop."""
    body, content_type = request.app.state.metrics.render()
    return Response(body, media_type=content_type)


@router.get("/version", response_class=Response)
async def get_version() -> Response:
    return json_response({"version": server_version()})


def _lost_hosts(service: Service) -> dict[str, list[int]]:
    """The numbers of the hosts that are gone, where the engine spans several."""
    hosts = service.snapshot.hosts if service.snapshot is not None else ()
    return {"lost_hosts": lost} if (lost := [host.host_id for host in hosts if host.state == "gone"]) else {}


def server_version() -> str:
    try:
        return version("moe-ladder")
    except PackageNotFoundError:
        return "0.0.0"
