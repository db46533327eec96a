"""What GET /admin/v1/requests and /admin/v1/requests/{id} answer: one request's way through the engine. No text of it."""

from typing import Literal

from pydantic import Field

from control_plane.wire import Wire


class TimelineEvent(Wire):
    """What happened to a request at `time` (Unix seconds), `offset_s` after its arrival.

    kind: arrived; prefill (a chunk was computed); decode (consecutive launches of one rung, joined); preempted;
    first_token; finished. `duration_s` is from the launch to the read of a prefill or of the joined decodes.
    """

    time: float
    offset_s: float
    kind: Literal["arrived", "prefill", "decode", "preempted", "first_token", "finished"]
    rung: str = ""
    duration_s: float = 0.0
    tokens: int = 0  # positions computed in prefill, tokens read in decode
    launches: int = 0
    detail: str = ""


class RequestRow(Wire):
    """A request in the list. Seconds are null until they are known."""

    id: str  # the engine's: unique
    call_id: str  # X-Request-Id of the HTTP call, which may have several requests (n, several prompts)
    response_id: str  # `id` of the answer: chatcmpl-..., cmpl-...
    state: Literal["waiting", "running", "finished"]
    arrived: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str | None
    queue_s: float | None
    prefill_s: float | None  # from the first launch to the first token
    ttft_s: float | None
    decode_s: float | None
    e2e_s: float | None
    num_preemptions: int


class RequestTimeline(RequestRow):
    """rungs: launches by rung. num_dropped: events that did not fit (a timeline keeps at most 128)."""

    events: list[TimelineEvent] = Field(default_factory=list)
    rungs: dict[str, int] = Field(default_factory=dict)
    num_dropped: int = 0


class RequestList(Wire):
    """The newest first. `available` false: the timeline is switched off (`console.request_timeline`)."""

    available: bool
    reason: str = ""
    kept: int = 0  # most that are kept
    data: list[RequestRow] = Field(default_factory=list)


class TimelineAnswer(Wire):
    """The requests of one call or response, or the one request with that id."""

    data: list[RequestTimeline]
