"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from control_plane.answers import completion_answer, open_call
from control_plane.call import until_disconnect
from control_plane.errors import json_response
from control_plane.plan import plan_completion
from control_plane.routes.context import CallContext, ignored_header
from control_plane.schemas import CompletionBody
from control_plane.sse import EventStreamResponse
from control_plane.streams import CompletionWriter, stream

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_class=Response)
async def create(body: CompletionBody, request: Request, context: CallContext) -> Response:
    service = context.service
    plan = await plan_completion(service, body, context.timeout_s, context.key_id)
    context.name_call(plan.call_id)
    headers = ignored_header(body, _without_effect(body))
    if body.stream:
        call = open_call(service, plan)
        chunks = stream(call, plan, CompletionWriter(service, plan, body))
        return EventStreamResponse(chunks, call, headers)
    answer = await until_disconnect(request.receive, completion_answer(service, plan, body))
    return json_response(answer, 200 if answer else 499, headers)


def _without_effect(body: CompletionBody) -> list[str]:
    names = ["suffix"] if body.suffix else []
    return names + (["stream_options"] if body.stream_options and not body.stream else [])
