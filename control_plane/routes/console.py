"""GET /admin/v1/console/{page}: what the operator console shows; GET /admin/v1/whoami: what the caller may do."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from control_plane.console.pages import ConsolePages
from control_plane.console_schemas import PAGES, Span
from control_plane.errors import NotFound, clean, json_response

router = APIRouter(prefix="/admin/v1", tags=["admin"], default_response_class=Response)
MAX_ETAGS = 1024  # characters of If-None-Match that are looked at


@router.get("/console/{page}")
async def show(
    page: str,
    request: Request,
    span: Annotated[Span, Query(description="how far back the series go")] = "15min",
    if_none_match: Annotated[str | None, Header(description="ETag of the page that is known")] = None,
) -> Response:
    if page not in PAGES:
        raise NotFound(f"There is no page {clean(page, 32)!r}; there are {', '.join(PAGES)}.", param="page")
    console: ConsolePages = request.app.state.console
    found = await console.page(page, span)
    headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
    if found.etag in (if_none_match or "")[:MAX_ETAGS]:
        return Response(status_code=304, headers=headers)
    return Response(found.body, headers=headers, media_type="application/json")


@router.get("/whoami")
async def whoami(request: Request) -> Response:
    state = request.scope["state"]
    return json_response({"actor": state["actor"], "role": state["role"]})
