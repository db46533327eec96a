"""POST /tokenize and /detokenize (also under /v1), GET /tokenizer_info."""

from fastapi import APIRouter, Response

from control_plane.errors import json_response
from control_plane.routes.context import Service
from control_plane.schemas import DetokenizeBody, TokenizeBody
from runtime.errors import InvalidRequest

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_class=Response)
@router.post("/v1/tokenize", response_class=Response, include_in_schema=False)
async def tokenize(body: TokenizeBody, service: Service) -> Response:
    if body.model is not None:
        service.require_model(body.model)
    if body.messages is not None:
        ids = await service.text.encode_chat([message.plain() for message in body.messages])
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        ids = await service.text.encode(text, add_special_tokens=body.add_special_tokens is not False)
    answer = {"count": len(ids), "max_model_len": service.model.card.max_context, "tokens": ids}
    if body.return_token_strs:
        token_bytes = service.model.tokenizer.token_bytes
        answer["token_strs"] = [token_bytes(token).decode("utf-8", "replace") for token in ids]
    return json_response(answer)


@router.post("/detokenize", response_class=Response)
@router.post("/v1/detokenize", response_class=Response, include_in_schema=False)
async def detokenize(body: DetokenizeBody, service: Service) -> Response:
    if body.model is not None:
        service.require_model(body.model)
    vocab_size = service.model.card.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise InvalidRequest(f"A token id is outside of the vocabulary of {vocab_size}.", param="tokens")
    text = await service.text.decode(body.tokens)
    return json_response({"prompt": text, "content": text})


@router.get("/tokenizer_info", response_class=Response)
async def tokenizer_info(service: Service) -> Response:
    card = service.model.card
    has_template = service.model.chat_template.is_present
    facts = {"vocab_size": card.vocab_size, "model_max_length": card.max_context}
    return json_response(
        {"tokenizer_class": type(service.model.tokenizer).__name__, "has_chat_template": has_template} | facts
    )
