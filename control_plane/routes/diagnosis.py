"""GET /admin/v1/diagnosis: what is wrong and what helps; POST /admin/v1/diagnosis/{id}/apply does it."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from control_plane.admin_schemas import etag, read_body
from control_plane.diagnosis import diagnose
from control_plane.errors import InvalidConfig, NotFound, clean, json_response
from control_plane.finding import MIN_WINDOW_S, Finding
from control_plane.live_config import LiveConfig
from control_plane.routes.admin import JSON_BODY, Caller
from control_plane.routes.context import Service
from control_plane.routes.ladder import ApplyBody, apply_patch
from control_plane.service import EngineService

router = APIRouter(prefix="/admin/v1/diagnosis", tags=["admin"], default_response_class=Response)


@router.get("")
async def show(service: Service, caller: Caller) -> Response:
    """`window_s` is null, and nothing is found, in the first seconds."""
    findings, window_s = await _findings(service, caller.live)
    return json_response(
        {
            "revision": caller.live.revision,
            "window_s": window_s,
            "min_window_s": MIN_WINDOW_S,
            "findings": [_shown(finding) for finding in findings],
        }
    )


@router.post("/{finding_id}/apply", openapi_extra=JSON_BODY)
async def apply(finding_id: str, request: Request, service: Service, caller: Caller) -> Response:
    """Judges anew and applies what the finding proposes now. 404 when the trouble is gone."""
    body = await read_body(request, ApplyBody)
    revision = caller.live.revision
    findings, _ = await _findings(service, caller.live)
    finding = next((f for f in findings if f.id == finding_id), None)
    if finding is None:
        raise NotFound(f"There is no finding {clean(finding_id, 64)!r} now.", param="id")
    if finding.patch is None:
        raise InvalidConfig(f"{finding.id} has no patch: {finding.why_no_patch}.", param="id")
    answer, number = await apply_patch(caller, finding.patch, body, revision)
    return json_response(answer | {"finding": _shown(finding)}, headers=etag(number))


async def _findings(service: EngineService, live: LiveConfig) -> tuple[tuple[Finding, ...], float | None]:
    """Of the window that ends now."""
    history = service.sampler.recent
    if (snapshot := service.snapshot) is not None:
        history.add(time.monotonic(), snapshot)
    window = history.window()
    if window is None:
        return (), None
    return await asyncio.to_thread(diagnose, window, live.effective), window.seconds


def _shown(finding: Finding) -> dict[str, Any]:
    return {"id": finding.id} | asdict(finding)
