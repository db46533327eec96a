"""What GET /admin/v1/console/{page} and /admin/v1/requests answer, as pydantic types. Wire format only, no logic.

Times are Unix seconds (UTC), durations seconds, shares 0 to 1. A figure that is not known is null, never 0. A part that
this server lacks has `available` false and a `reason`. Servers may add fields; clients ignore what they do not know.
"""

from typing import Any, Literal, get_args

from control_plane.expert_schemas import Placement, Residency
from control_plane.wire import Part, Wire

Span = Literal["15min", "3h", "24h"]
Page = Literal["overview", "buckets", "experts", "kv", "scaling", "economics", "diagnosis", "audit"]
SPANS: tuple[Span, ...] = get_args(Span)
PAGES: tuple[Page, ...] = get_args(Page)


class WhoAmI(Wire):
    """GET /admin/v1/whoami. A viewer may look and plan, an operator may do everything."""

    actor: str  # 12 hex digits of the key's digest, or "demo"
    role: Literal["operator", "viewer"]


class Series(Wire):
    """One line of a plot. `values[i]` belongs to the interval that ends at the page's `times[i]`.

    low, high: the least and greatest sample of the interval, where `name` is a gauge; else empty.
    label: what tells it from its sisters of the same name: a rung, a phase; empty when it is alone.
    """

    name: str
    unit: str  # "s", "1/s", "tokens/s", "share", "requests", "pages", "rows", "1"
    label: str = ""
    values: list[float | None]
    low: list[float | None] = []
    high: list[float | None] = []


class ConsolePage(Wire):
    """What every page begins with.

    version: revision of the configuration. server_time: when the page was made. data_age_s: how old the engine's state
    was then; null while there is none. Both grow apart when the engine's thread hangs.
    state: loading, ready, draining, failed, stopped. times: right ends of the intervals, ascending; at most 500.
    """

    page: Page
    span: Span
    version: int | None
    server_time: float
    data_age_s: float | None
    tick_s: float  # how often a page changes; asking more often answers 304
    state: str
    error: str = ""
    model: str = ""
    step_s: float  # width of an interval, nominal
    times: list[float] = []
    series: list[Series] = []


class Now(Wire):
    """The newest state; rates are over the last 10 s or so."""

    uptime_s: float
    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_open_calls: int
    batch_size: int
    micro_batch_size: int
    kv_use: float | None
    busy_share: float | None
    generation_tokens_s: float | None
    prompt_tokens_s: float | None
    requests_s: float | None
    num_rungs: int
    num_rungs_ready: int
    late_compiles: int
    num_preemptions: int


class Promises(Wire):
    """Over the span: requests that ended well, and those of them that kept both promises (TTFT and TPOT)."""

    ttft_s: float  # what is promised now
    itl_s: float
    num_requests: int
    num_kept: int
    attainment: float | None
    goodput_s: float | None  # requests a second that kept both
    num_ttft_missed: int
    num_itl_missed: int


class Percentiles(Wire):
    """Of the span; null when nothing was seen. As fine as the engine's histogram buckets."""

    name: Literal["ttft", "itl", "e2e", "queue"]
    num_seen: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class Alert(Wire):
    """Something that somebody should look at. `page` is where it is explained."""

    id: str
    severity: Literal["critical", "warning", "info"]
    text: str
    page: str
    since: float


class RecentChange(Wire):
    """A line of the audit, shortened."""

    number: int
    time: float
    event: str
    actor: str
    reason: str
    result: str
    revision: int | None = None
    changes: list[dict[str, Any]] = []  # path, kind, old, new


class OverviewPage(ConsolePage):
    """series: ttft_p50, ttft_p90, ttft_p99, itl_p50, itl_p90, itl_p99, e2e_p99, queue_p99 (s); generation_tokens,
    prompt_tokens (tokens/s); requests, goodput, preemptions, rejections (1/s); slo_attainment, busy_share, kv_use
    (share); running, waiting (requests)."""

    now: Now | None
    promises: Promises | None
    percentiles: list[Percentiles] = []
    alerts: list[Alert] = []
    recent_changes: list[RecentChange] = []


class RungRow(Wire):
    """One rung. `*_span` figures are of the page's span, the others since the start."""

    name: str
    phase: Literal["prefill", "decode"]
    size: int  # positions: tokens in prefill, rows in decode
    state: Literal["absent", "compiling", "ready", "failed"]
    error: str = ""
    hits: int
    hits_span: int
    computed_span: int  # positions computed, padding included
    occupancy: float | None  # real positions over computed ones
    occupancy_span: float | None
    padding_span: int  # positions computed that nobody asked for
    step_s: float | None  # median of the last launches
    busy_share_span: float | None
    compile_s: float
    from_cache: bool
    temp_bytes: int


class Move(Wire):
    """A number that a controller moved, or a change of the ladder (controller "ladder")."""

    time: float
    number: int  # of the decision; 0 for the ladder
    controller: str
    previous: float | None
    value: float | None
    reason: str
    inputs: dict[str, float | int | str | None] = {}


class ReasonCount(Wire):
    controller: str
    reason: str
    num: int  # since the start, moves and stays together


class LadderNow(Wire):
    state: str  # steady, compiling, failed
    rungs_to_add: list[str]
    rungs_to_drop: list[str]
    error: str
    seconds: float
    max_rungs: int
    num_changes: int


class BucketsPage(ConsolePage):
    """series: batch_size, micro_batch_size (requests); padding_share (share, one a phase); rung_hits (1/s, one a rung, the
    12 most used of the span); late_compiles (1, total). moves: of the span, newest first, at most 300. The proposal of a
    learned ladder is GET /admin/v1/ladder."""

    rungs: list[RungRow] = []
    ladder: LadderNow | None
    moves: list[Move] = []
    num_moves: int = 0  # of the span, those not shown included
    reasons: list[ReasonCount] = []


class ExpertsPage(ConsolePage):
    """tokens[layer][expert]: routed in the last `window_s` seconds (about the span; less in the beginning).

    imbalance: busiest expert over the mean of its layer, by layer; null for a layer that saw nothing.
    series: expert_imbalance_mean, expert_imbalance_max (1, over layers), routed_tokens (tokens/s). Where experts sleep also
    resident_share (share); late_fetches, prefetches_used, prefetches_unused (1/step); residency_changes (1/s, one a reason).
    """

    num_layers: int = 0
    num_experts: int = 0
    window_s: float = 0.0
    tokens: list[list[int]] = []
    imbalance: list[float | None] = []
    num_idle: int = 0  # experts that got no token in the window
    placement: Placement
    residency: Residency = Residency(available=False)


class KvLevel(Part):
    """One level of KV memory: L1 device, L2 host, L3 shared store."""

    level: Literal["L1", "L2", "L3"]
    place: str
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    num_pages: int | None = None
    used_pages: int | None = None  # by running sequences
    cached_pages: int | None = None  # kept for a prefix that may come again; free when needed
    hit_share: float | None = None  # tokens found over tokens looked up, in the span
    promotions_s: float | None = None
    evictions_s: float | None = None
    read_bytes_s: float | None = None
    written_bytes_s: float | None = None


class KvPage(ConsolePage):
    """series: used_pages, cached_pages (pages); hit_share (share); cached_tokens (tokens/s); preemptions (1/s)."""

    page_size: int = 0  # tokens
    page_bytes: int = 0
    prefix_cache_enabled: bool = False
    looked_up_tokens: int = 0  # of the span
    found_tokens: int = 0
    num_preemptions_span: int = 0
    levels: list[KvLevel] = []


class ScalingPage(ConsolePage):
    """autoscaling and forecast tell why they are not there. series: workers (1)."""

    num_workers: int
    autoscaling: Part
    forecast: Part


class Price(Wire):
    """USD; per million tokens, and per worker-hour. `revision` brought it in; in force from `since` (null: always)."""

    since: float | None
    revision: int | None
    input: float
    cached_input: float
    output: float
    worker_hour: float


class LedgerRow(Wire):
    """Tokens, time and money of [start, end). Money is of the part that had a price, `priced_share` of the worker-hours;
    null where none had."""

    start: float
    end: float
    input_tokens: int  # computed
    cached_input_tokens: int
    output_tokens: int
    worker_hours: float
    idle_share: float | None
    cost_usd: float | None
    income_usd: float | None
    margin: float | None  # (income - cost) / cost
    priced_share: float = 1.0


class PhaseCost(Wire):
    """What a million tokens of a phase cost. busy: for the time that the device worked on it; loaded: idle time too."""

    phase: Literal["prefill", "decode"]
    tokens: int
    busy_s: float
    usd_per_million_busy: float | None
    usd_per_million_loaded: float | None


class Ledger(Part):
    """A day, or what there is of it. `label` and `source` say whose."""

    label: str = ""
    source: str = ""
    total: LedgerRow | None = None
    hours: list[LedgerRow] = []  # oldest first, the newest may be shorter than an hour; at most 25
    phases: list[PhaseCost] = []


class EconomicsPage(ConsolePage):
    """ledger: this server, last 24 h at most, whatever the span; not available until a price is set, but its tokens and
    hours are shown then too. example: the public DeepSeek day, by the same function; always available.
    series: cost, income (USD/h), idle_share (share), over the span."""

    prices: list[Price] = []  # of the last 24 h and the future, oldest first
    price_now: Price | None = None
    ledger: Ledger
    example: Ledger


class FindingRow(Wire):
    """As GET /admin/v1/diagnosis shows it; POST /admin/v1/diagnosis/{id}/apply is the one click."""

    id: str
    kind: str
    subject: str
    severity: Literal["critical", "warning", "info"]
    symptom: str
    evidence: dict[str, float | int | str]
    expected_effect: str
    patch: dict[str, Any] | None
    why_no_patch: str


class DiagnosisPage(ConsolePage):
    window_s: float | None = None  # null: not enough seen yet
    min_window_s: float = 0.0
    findings: list[FindingRow] = []


class AuditPage(ConsolePage):
    """The newest 100 lines as GET /admin/v1/audit shows them; older ones there, by `before`."""

    entries: list[dict[str, Any]] = []
    before: int | None = None


PAGE_TYPES: dict[str, type[ConsolePage]] = {
    "overview": OverviewPage,
    "buckets": BucketsPage,
    "experts": ExpertsPage,
    "kv": KvPage,
    "scaling": ScalingPage,
    "economics": EconomicsPage,
    "diagnosis": DiagnosisPage,
    "audit": AuditPage,
}
