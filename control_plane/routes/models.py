"""GET /v1/models and /v1/models/{id}: the served model, under its name and its aliases."""

from typing import Any

from fastapi import APIRouter, Response

from control_plane.errors import json_response
from control_plane.routes.context import Service
from control_plane.service import EngineService

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_class=Response)
async def list_models(service: Service) -> Response:
    return json_response({"object": "list", "data": [_card(service, name) for name in service.model_names]})


@router.get("/{name:path}", response_class=Response)
async def retrieve(name: str, service: Service) -> Response:
    service.require_model(name)
    return json_response(_card(service, name))


def _card(service: EngineService, name: str) -> dict[str, Any]:
    card = service.model.card
    owner = {"owned_by": "local", "root": card.name}
    return {"id": name, "object": "model", "created": card.created, "max_model_len": card.max_context} | owner
