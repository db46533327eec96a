"""AdminClient: typed, synchronous access to a server's admin routes, for the console, tests and benchmarks.

Imports nothing of `runtime`: it speaks HTTP only. One instance may be shared by threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from control_plane.console_schemas import PAGE_TYPES, ConsolePage, Page, Span, WhoAmI
from control_plane.request_schemas import RequestList, RequestTimeline, TimelineAnswer
from control_plane.wire import Wire

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 32 << 20
MAX_MESSAGE_CHARS = 2000

type Json = dict[str, Any]


class AdminError(Exception):
    """An answer that is no success, or none at all.

    status: HTTP status; 0 when there was no usable answer (`code` unreachable, timeout, bad_answer or bad_key).
    revision: the current revision where a stale change (412) was refused. retry_after_s: what the server asked for.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        revision: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status} {code}: {message}" if status else f"{code}: {message}")
        self.status, self.code, self.message = status, code, message
        self.param, self.revision, self.retry_after_s = param, revision, retry_after_s

    @property
    def is_stale(self) -> bool:
        """Somebody else changed the configuration since it was read."""
        return self.status == 412


@dataclass(frozen=True, slots=True)
class Cached[P: ConsolePage]:
    """A page with its ETag. is_same: the server said that it has not changed (304)."""

    page: P
    etag: str
    is_same: bool = False


class AdminClient:
    """base_url: of the server, without /admin. key: an operator's or a viewer's; None in demo mode.

    The constructor and every method raise AdminError. Changes take the `revision` that they were made for (If-Match).
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if key and not (key.isascii() and key.isprintable()):
            raise AdminError(0, "bad_key", "the key must be printable ASCII")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def whoami(self) -> WhoAmI:
        """Whose key this is and what it may do."""
        return _parsed(WhoAmI, self._send("GET", "/admin/v1/whoami"))

    # -- the console ---------------------------------------------------------------------------------------------

    def page(self, page: Page, span: Span = "15min") -> ConsolePage:
        """The page as its type in PAGE_TYPES."""
        return self.cached_page(page, span).page

    def cached_page(
        self, page: Page, span: Span = "15min", before: Cached[ConsolePage] | None = None
    ) -> Cached[ConsolePage]:
        """before: what this method gave for the same page and span the last time; given back when nothing is new."""
        headers = {"If-None-Match": before.etag} if before else {}
        answer = self._send("GET", f"/admin/v1/console/{quote(page)}", params={"span": span}, headers=headers)
        if answer.status_code == 304 and before is not None:
            return Cached(before.page, before.etag, is_same=True)
        return Cached(_parsed(PAGE_TYPES[page], answer), answer.headers.get("etag", ""))

    def requests(self, limit: int = 50) -> RequestList:
        return _parsed(RequestList, self._send("GET", "/admin/v1/requests", params={"limit": limit}))

    def request(self, name: str) -> list[RequestTimeline]:
        """Timelines of a call (`x-request-id`), a response (`chatcmpl-...`) or one request. 404 when it is not kept."""
        answer = self._send("GET", f"/admin/v1/requests/{quote(name, safe='')}")
        return _parsed(TimelineAnswer, answer).data

    # -- configuration -------------------------------------------------------------------------------------------

    def config(self) -> Json:
        """`revision`, `effective`, `stored`, `defaults`, `pending_restart` and so on."""
        return self._json("GET", "/admin/v1/config")

    def config_schema(self) -> Json:
        return self._json("GET", "/admin/v1/config/schema")

    def plan(self, patch: Mapping[str, Any], canary: Mapping[str, Any] | None = None) -> Json:
        """What a patch would do: fields, rungs, seconds, bytes, warnings. Changes nothing."""
        return self._json("POST", "/admin/v1/config/plan", _body(patch=patch, canary=canary))

    def change(
        self,
        patch: Mapping[str, Any],
        *,
        revision: int,
        reason: str = "",
        canary: Mapping[str, Any] | None = None,
    ) -> Json:
        """The new revision. `is_stale` is set on the error when `revision` is not current any more."""
        body = _body(patch=patch, reason=reason, canary=canary)
        return self._json("PATCH", "/admin/v1/config", body, revision)

    def rollback(self, to: int, *, revision: int, reason: str = "") -> Json:
        return self._json("POST", "/admin/v1/config/rollback", _body(revision=to, reason=reason), revision)

    def history(self, before: int | None = None, limit: int = 50) -> Json:
        return self._json("GET", "/admin/v1/config/history", params=_page(before, limit))

    def canary(self) -> Json | None:
        """The trial that runs, or None."""
        return self._json("GET", "/admin/v1/canary").get("canary")

    def accept_canary(self, reason: str = "") -> Json:
        return self._json("POST", "/admin/v1/canary/accept", _body(reason=reason))

    def revert_canary(self, reason: str = "") -> Json:
        return self._json("POST", "/admin/v1/canary/revert", _body(reason=reason))

    # -- advice and audit ----------------------------------------------------------------------------------------

    def ladder(self) -> Json:
        return self._json("GET", "/admin/v1/ladder")

    def apply_ladder(self, reason: str = "", canary: Mapping[str, Any] | None = None) -> Json:
        return self._json("POST", "/admin/v1/ladder/apply", _body(reason=reason, canary=canary))

    def diagnosis(self) -> Json:
        return self._json("GET", "/admin/v1/diagnosis")

    def apply_finding(
        self, finding_id: str, reason: str = "", canary: Mapping[str, Any] | None = None
    ) -> Json:
        path = f"/admin/v1/diagnosis/{quote(finding_id, safe='')}/apply"
        return self._json("POST", path, _body(reason=reason, canary=canary))

    def audit(self, before: int | None = None, limit: int = 50) -> Json:
        return self._json("GET", "/admin/v1/audit", params=_page(before, limit))

    def verify_audit(self) -> Json:
        return self._json("GET", "/admin/v1/audit/verify")

    def decisions(self, after: int = 0, limit: int = 100) -> list[Json]:
        return self._json("GET", "/admin/v1/decisions", params={"after": after, "limit": limit})["data"]

    # -- experts' placement -------------------------------------------------------------------------------------

    def experts(self) -> Json | None:
        """Where experts sit and what their devices computed; None on one device."""
        return self._json("GET", "/admin/v1/experts").get("experts")

    def rebalance_experts(self, *, dry_run: bool, reason: str = "") -> Json:
        """The full rebalance for the load of late: shown, or carried out. 422 on one device and before any traffic."""
        body = _body(dry_run=dry_run, reason=reason)
        return self._json("POST", "/admin/v1/experts/rebalance", body)

    def pause_experts(self, is_paused: bool, reason: str = "") -> Json:
        """The status after it. Paused: nothing moves by itself, and what waits is dropped."""
        return self._json("POST", "/admin/v1/experts/pause", _body(paused=is_paused, reason=reason))

    def pin_experts(self, layers: Sequence[int], reason: str = "") -> Json:
        """The status after it. layers: all those that stay as they are; none frees all."""
        return self._json("POST", "/admin/v1/experts/pin", _body(layers=list(layers), reason=reason))

    # -- one exchange --------------------------------------------------------------------------------------------

    def _json(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        revision: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Json:
        headers = {"If-Match": f'"{revision}"'} if revision is not None else {}
        found = _decoded(self._send(method, path, body=body, params=params, headers=headers))
        if not isinstance(found, dict):
            raise AdminError(0, "bad_answer", f"{method} {path} did not answer with a JSON object")
        return cast(Json, found)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body, params=params, headers=headers)
        except httpx.TimeoutException:
            raise AdminError(0, "timeout", f"{method} {path} took too long") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"{method} {path}: {type(error).__name__}: {error}"
            raise AdminError(0, "unreachable", text[:MAX_MESSAGE_CHARS]) from None
        if len(answer.content) > MAX_ANSWER_BYTES:
            raise AdminError(0, "bad_answer", f"{method} {path} answered {len(answer.content)} bytes")
        if answer.is_success or answer.status_code == 304:
            return answer
        raise _error(answer)


def _body(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _page(before: int | None, limit: int) -> Json:
    return _body(before=before, limit=limit)


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise AdminError(0, "bad_answer", f"the answer to {answer.request.url.path} is no JSON") from None


def _parsed[W: Wire](kind: type[W], answer: httpx.Response) -> W:
    try:
        return kind.model_validate(_decoded(answer))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        text = f"the answer to {answer.request.url.path} does not fit: {where}: {first['msg']}"
        raise AdminError(0, "bad_answer", text[:MAX_MESSAGE_CHARS]) from None


def _error(answer: httpx.Response) -> AdminError:
    """From the error body; from the status alone where something else answered, a proxy perhaps."""
    status = answer.status_code
    try:
        body = answer.json()
    except ValueError:
        body = None
    found = body.get("error") if isinstance(body, dict) else None
    if not isinstance(found, dict):
        return AdminError(
            status, "http_error", f"{answer.request.method} {answer.request.url.path}: {status}"
        )
    revision = body.get("revision") if isinstance(body, dict) else None
    return AdminError(
        status,
        str(found.get("code") or "http_error"),
        str(found.get("message") or "")[:MAX_MESSAGE_CHARS],
        param=str(found["param"]) if found.get("param") else None,
        revision=revision if isinstance(revision, int) else None,
        retry_after_s=_seconds(answer.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else None
