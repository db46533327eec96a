"""Every error the API can answer, in OpenAI's body, with bounded text that names no path, address or large input."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.errors import InvalidRequest, RuntimeFault

MAX_ERRORS = 10
MAX_TEXT = 200
MAX_MESSAGE = MAX_ERRORS * MAX_TEXT
MAX_RETRY_AFTER_S = 60

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_PATH = re.compile(r"(?<![\w<])/(?:[\w.+\-]+/)+[\w.+\-]*")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"
    status = 404


class NotFound(InvalidRequest):
    """The object that the path names does not exist."""

    code = "not_found"
    status = 404


class InvalidConfig(InvalidRequest):
    """The new configuration is wrong or does not fit; nothing was changed."""

    code = "invalid_config"
    status = 422


class PreconditionMissing(InvalidRequest):
    """A change must say which revision it was made for."""

    code = "precondition_required"
    status = 428


class StaleRevision(InvalidRequest):
    """Somebody else changed the configuration since; `revision` is the current one."""

    code = "stale_revision"
    status = 412

    def __init__(self, message: str, revision: int) -> None:
        super().__init__(message, param="If-Match")
        self.revision = revision


class ChangeLocked(InvalidRequest):
    """A change is on trial (423: clients of the OpenAI API would try a 409 again by themselves)."""

    code = "canary_running"
    status = 423


class StoreFailed(RuntimeFault):
    """The folder of configuration versions cannot be written; nothing was changed."""

    code = "store_failed"
    status = 507


class EngineFault(RuntimeFault):
    """The engine gave up on a request that was fine."""

    code = "engine_error"


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """`text` without lone surrogates, file paths and memory addresses, cut to `limit` characters."""
    text = text[: 4 * limit].encode("utf-8", "replace").decode()
    text = _PATH.sub("<path>", _ADDRESS.sub("<address>", text))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_body(message: str, *, type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def fault_body(fault: RuntimeFault) -> dict[str, Any]:
    param = clean(fault.param) if fault.param else None
    body = error_body(clean(fault.message, MAX_MESSAGE), type=fault.type, code=fault.code, param=param)
    return body | ({"revision": fault.revision} if isinstance(fault, StaleRevision) else {})


def retry_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """Retry-After for the two statuses that invite another try."""
    if status not in (429, 503):
        return {}
    return {"Retry-After": str(min(MAX_RETRY_AFTER_S, max(1, math.ceil(retry_after_s or 1))))}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def fault_response(fault: RuntimeFault) -> Response:
    return json_response(fault_body(fault), fault.status, retry_headers(fault.status, fault.retry_after_s))


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error that is about HTTP rather than the engine."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = _CODES.get(status, "internal_error" if status >= 500 else "invalid_request")
    return json_response(error_body(message, type=kind, code=code), status, headers)


def validation_fault(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """One fault for what pydantic found: at most ten findings, without the input."""
    lines = []
    for found in errors[:MAX_ERRORS]:
        where = _location(found)
        text = str(found["msg"]).removeprefix("Value error, ")
        lines.append(clean(f"{where}: {text}" if where else text))
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    fault = InvalidRequest("; ".join(lines), param=_location(errors[0]) or None)
    fault.code = _validation_code(str(errors[0]["type"]))
    return fault


def install_handlers(app: FastAPI) -> None:
    """Makes `app` answer every exception in OpenAI's body."""

    @app.exception_handler(RuntimeFault)
    async def runtime_fault(_: Request, fault: RuntimeFault) -> Response:
        return fault_response(fault)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return fault_response(validation_fault(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return status_response(error.status_code, clean(str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return status_response(500, "The server failed to handle the request.")


def _location(found: Mapping[str, Any]) -> str:
    """`messages.0.content` from pydantic's path; names of union members (`list[str]`) and of the body are left out."""
    parts = [str(part)[:64] for part in found["loc"][:10] if part != "body"]
    return clean(".".join(p for p in parts if not re.search(r"[\[\]\-()]|^(str|int|float|bool)$", p)))


def _validation_code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    if kind == "json_invalid":
        return "invalid_json"
    return "invalid_type" if kind.endswith("_type") or kind.endswith("_parsing") else "invalid_value"
