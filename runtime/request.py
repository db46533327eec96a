"""What crosses the engine's edge: a request in, token events out. All frozen; imports no JAX."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

MAX_STOP_TOKEN_IDS = 8  # the device checks this many ids for each row, end-of-text ids included
MAX_TOP_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the text. `kind` is "json_object", "json_schema", "regex" or "lark"; `source` its text."""

    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens for one request. Bounds are checked at the edge (control_plane) and again by `validate`.

    temperature 0 means greedy; top_k 0 means no limit; logprobs None means off, 0 the chosen token only.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def all_stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Token ids that end the text: the request's own and, unless it ignores them, the model's."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)

    @property
    def needs_dense_row(self) -> bool:
        """Whether the row needs its vocabulary-wide counts or bias on the device."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` of the HTTP API becomes n requests. Times are `time.monotonic()` seconds.

    traffic_key: what kind of text it is, as the caller says (data set, route, tenant); only forecasts of the experts' load
    go by it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    traffic_key: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and the `top` alternatives as (token id, log probability), best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one request. `text` never holds half a character nor part of a stop string.

    The last event of a request has `finish_reason`; `stop_reason` is the matched stop string or token id.
    `prompt_logprobs` comes once, with the first event, when asked for.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
