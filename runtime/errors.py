"""Typed errors with stable codes; the HTTP layer turns them into OpenAI error bodies. Imports no JAX."""


class RuntimeFault(Exception):
    """Base of every error that a caller may see. `code` is stable, `status` is the HTTP status, `param` the field."""

    code = "internal_error"
    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RuntimeFault):
    """The request can never be served as it is."""

    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt plus output does not fit the context; the message holds both numbers."""

    code = "context_length_exceeded"


class BucketMiss(InvalidRequest):
    """No rung of the ladder covers the request, whatever the load."""

    code = "no_bucket_covers_request"


class QueueFull(RuntimeFault):
    """Capacity exists but is contended (429)."""

    code = "rate_limit_exceeded"
    status = 429
    type = "rate_limit_error"


class DeadlineExceeded(RuntimeFault):
    """The request waited longer than its deadline allows (429: another try may fit)."""

    code = "deadline_exceeded"
    status = 429
    type = "rate_limit_error"


class Unavailable(RuntimeFault):
    """Nothing can serve now: loading, draining or failed (503)."""

    code = "server_is_overloaded"
    status = 503
    type = "service_unavailable_error"


class ModelLoadError(RuntimeFault):
    """The model folder is missing, truncated, incomplete or of an architecture or setting not supported."""

    code = "model_load_error"


class CompileFailed(RuntimeFault):
    """A rung could not be compiled; the message names the rung."""

    code = "compile_failed"
