"""POST /v1/chat/completions, and the completions kept by `store: true`."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from control_plane.answers import chat_answer, open_call
from control_plane.call import until_disconnect
from control_plane.errors import json_response
from control_plane.plan import plan_chat
from control_plane.routes.context import CallContext, ignored_header
from control_plane.schemas import ChatBody, StoredUpdate
from control_plane.sse import EventStreamResponse
from control_plane.streams import ChatWriter, stream

router = APIRouter(prefix="/v1/chat/completions", tags=["chat"])


@router.post("", response_class=Response)
async def create(body: ChatBody, request: Request, context: CallContext) -> Response:
    service = context.service
    plan = await plan_chat(service, body, context.timeout_s, context.key_id)
    context.name_call(plan.call_id)
    headers = ignored_header(body, ["stream_options"] if body.stream_options and not body.stream else [])
    if body.stream:
        call = open_call(service, plan)
        return EventStreamResponse(stream(call, plan, ChatWriter(service, plan, body)), call, headers)
    answer = await until_disconnect(request.receive, chat_answer(service, plan, body))
    if answer and body.store:
        metadata = body.metadata or {}
        service.stored.add(answer, key_id=context.key_id, name=context.request_name, metadata=metadata)
    return json_response(answer, 200 if answer else 499, headers)


@router.get("", response_class=Response)
async def list_stored(
    request: Request,
    context: CallContext,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=0, le=100)] = 20,
    model: Annotated[str | None, Query(max_length=256)] = None,
    order: Literal["asc", "desc"] | None = None,
) -> Response:
    """Completions made with `store: true`, oldest first unless `order=desc`; `metadata[key]=value` filters."""
    query = request.query_params.items()
    metadata = {k[9:-1]: v for k, v in query if k.startswith("metadata[") and k.endswith("]")}
    page = context.service.stored.list(
        context.key_id, after=after, limit=limit, descending=order == "desc", model=model, metadata=metadata
    )
    return json_response(page)


@router.get("/{completion_id}", response_class=Response)
async def retrieve(completion_id: str, context: CallContext) -> Response:
    return json_response(context.service.stored.get(completion_id, context.key_id))


@router.post("/{completion_id}", response_class=Response)
async def update(completion_id: str, body: StoredUpdate, context: CallContext) -> Response:
    return json_response(context.service.stored.update(completion_id, context.key_id, body.metadata))


@router.delete("/{completion_id}", response_class=Response)
async def delete(completion_id: str, context: CallContext) -> Response:
    return json_response(context.service.stored.remove(completion_id, context.key_id))
