"""GET /metrics: the engine's snapshot as Prometheus families, vLLM's names where they exist and moe_* for ours.

Nothing is counted twice: the engine owns its totals, this only translates them when somebody asks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import Scope

from runtime.engine.change import LadderState
from runtime.engine.expert_status import ResidencyStatus
from runtime.engine.host_status import HostStatus
from runtime.engine.stats import EngineSnapshot, Histogram, PromiseTotals, RungSnapshot

Sample = tuple[Sequence[str], float]
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class ControlFigures:
    """What live changes and controllers count: changes by result, decisions by (controller, reason)."""

    revision: int
    changes: Mapping[str, int]
    decisions: Mapping[tuple[str, str], int]


class HttpCounts:
    """Answers by method, route and status. Routes are templates, so their number is bounded."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, int]] = Counter()

    def add(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.answers[method, route, status] += 1


class Metrics:
    """One registry, owned by this process; `render` may run in any thread."""

    def __init__(
        self,
        snapshot: Callable[[], EngineSnapshot | None],
        model_name: Callable[[], str],
        http: HttpCounts,
        control: Callable[[], ControlFigures | None],
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(snapshot, model_name, http, control))
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _EngineCollector(Collector):
    def __init__(
        self,
        snapshot: Callable[[], EngineSnapshot | None],
        model_name: Callable[[], str],
        http: HttpCounts,
        control: Callable[[], ControlFigures | None],
    ) -> None:
        self._snapshot = snapshot
        self._model_name = model_name
        self._http = http
        self._control = control

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _http_family(self._http)
        snapshot = self._snapshot()
        if snapshot is None:
            return
        labels = _Labels(self._model_name())
        yield from _vllm_families(snapshot, labels)
        yield from _moe_families(snapshot, labels)
        yield from _promise_families(snapshot.promises, labels)
        yield from _rung_families(snapshot.rungs, labels)
        yield from _expert_families(snapshot.expert_tokens, labels)
        if snapshot.residency is not None:
            yield from _residency_families(snapshot.residency, labels)
        yield from _policy_families(snapshot, labels)
        yield from _host_families(snapshot.hosts, labels)
        if (control := self._control()) is not None:
            yield from _control_families(control, labels)


class _Labels:
    """Makes families that all carry model_name and engine, as vLLM's do."""

    def __init__(self, model_name: str) -> None:
        self._names = ("model_name", "engine")
        self._values = (model_name, "0")

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), [((), value)])

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, (), [((), value)])

    def gauges(self, name: str, text: str, extra: Sequence[str], samples: Iterable[Sample]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *extra])
        for values, value in samples:
            family.add_metric([*self._values, *values], value)
        return family

    def counters(self, name: str, text: str, extra: Sequence[str], samples: Iterable[Sample]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._names, *extra])
        for values, value in samples:
            family.add_metric([*self._values, *values], value)
        return family

    def histogram(self, name: str, text: str, found: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._names)
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, found.bounds)), "+Inf"], found.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(self._values, buckets, found.total)
        return family


def _http_family(http: HttpCounts) -> Metric:
    family = CounterMetricFamily("http_requests", "HTTP answers", labels=["method", "handler", "status"])
    for (method, route, status), count in sorted(http.answers.items()):
        family.add_metric([method, route, str(status)], count)
    return family


def _vllm_families(s: EngineSnapshot, make: _Labels) -> Iterator[Metric]:
    usage = s.used_pages / s.num_pages if s.num_pages else 0.0
    yield make.gauge("vllm:num_requests_running", "Requests that hold a row", s.num_running)
    yield make.gauge("vllm:num_requests_waiting", "Requests in the queue", s.num_waiting)
    yield make.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", usage)
    cache = (("page_size", "num_pages"), [((str(s.page_size), str(s.num_pages)), 1.0)])
    yield make.gauges("vllm:cache_config_info", "KV cache configuration", *cache)
    yield make.counter("vllm:prompt_tokens", "Prompt tokens", s.prompt_tokens)
    yield make.counter(
        "vllm:prompt_tokens_cached", "Prompt tokens found in the cache", s.cached_prompt_tokens
    )
    yield make.counter("vllm:generation_tokens", "Generated tokens", s.generation_tokens)
    by_reason = [((reason,), count) for reason, count in sorted(s.finished.items())]
    yield make.counters("vllm:request_success", "Finished requests", ["finished_reason"], by_reason)
    rejected = [((code,), count) for code, count in sorted(s.rejected.items())]
    yield make.counters("vllm:admission_rejections", "Requests refused by the engine", ["reason"], rejected)
    yield make.counter("vllm:num_preemptions", "Preemptions", s.num_preemptions)
    yield make.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", s.prefix_queries)
    yield make.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache", s.prefix_hits)
    yield make.histogram("vllm:time_to_first_token_seconds", "Arrival to first token", s.ttft_s)
    yield make.histogram("vllm:inter_token_latency_seconds", "Between tokens", s.itl_s)
    yield make.histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", s.e2e_s)
    yield make.histogram("vllm:request_queue_time_seconds", "Arrival to first step", s.queue_s)
    yield make.histogram("vllm:request_prefill_time_seconds", "First step to first token", s.prefill_s)
    yield make.histogram("vllm:request_decode_time_seconds", "First to last token", s.decode_s)
    yield make.histogram("vllm:request_prompt_tokens", "Prompt length", s.prompt_len)
    yield make.histogram("vllm:request_generation_tokens", "Generated length", s.generation_len)


def _moe_families(s: EngineSnapshot, make: _Labels) -> Iterator[Metric]:
    states = [((state,), float(state == s.state)) for state in ("loading", "ready", "draining", "failed")]
    yield make.gauges("moe_engine_state", "1 at the engine's state", ["state"], states)
    yield make.gauge("moe_uptime_seconds", "Since the engine started", s.uptime_s)
    yield make.counter("moe_steps", "Steps made", s.num_steps)
    yield make.counter(
        "moe_late_compiles", "Compiles after ready; anything but 0 is a fault", s.late_compiles
    )
    yield make.counter("moe_tile_misses", "Tiles that no tuning table of this GPU had", s.tile_misses)
    yield make.gauge("moe_waiting_tokens", "Prompt and output tokens of the queue", s.waiting_tokens)
    yield make.gauge(
        "moe_drain_rate_tokens", "Tokens finished for each second, lately", s.drain_rate_tokens_s
    )
    yield make.gauge("moe_kv_pages", "KV pages", s.num_pages)
    yield make.gauge("moe_kv_pages_used", "KV pages held by requests", s.used_pages)
    yield make.gauge("moe_kv_pages_cached", "KV pages kept for prefixes", s.cached_pages)
    yield make.histogram("moe_host_step_seconds", "Host time of a step without the device", s.host_step_s)
    busy = [((phase,), totals.busy_s) for phase, totals in sorted(s.phases.items())]
    yield make.counters("moe_busy_seconds", "Time that launches were on the device", ["phase"], busy)


def _promise_families(found: PromiseTotals, make: _Labels) -> Iterator[Metric]:
    yield make.counter("moe_slo_requests", "Requests that ended well", found.num_requests)
    yield make.counter("moe_slo_kept", "Requests that kept slo.ttft and slo.itl", found.num_kept)
    missed = [(("ttft",), float(found.num_ttft_missed)), (("itl",), float(found.num_itl_missed))]
    yield make.counters("moe_slo_missed", "Requests that missed a promise", ["promise"], missed)


def _rung_families(rungs: Sequence[RungSnapshot], make: _Labels) -> Iterator[Metric]:
    def per_rung(value: Callable[[RungSnapshot], float]) -> list[Sample]:
        return [((rung.name, rung.phase), value(rung)) for rung in rungs]

    names = ["rung", "phase"]
    states = [((rung.name, rung.phase, rung.state), 1.0) for rung in rungs]
    yield make.gauges("moe_rung_state", "1 at the rung's state", [*names, "state"], states)
    yield make.counters("moe_rung_hits", "Launches", names, per_rung(lambda r: r.hits))
    yield make.counters(
        "moe_rung_real_tokens", "Positions asked for", names, per_rung(lambda r: r.real_tokens)
    )
    computed = per_rung(lambda r: r.computed_tokens)
    yield make.counters("moe_rung_computed_tokens", "Positions computed, padding included", names, computed)
    yield make.gauges("moe_rung_compile_seconds", "Time to compile", names, per_rung(lambda r: r.compile_s))
    yield make.gauges(
        "moe_rung_step_seconds", "Median of the last launches", names, per_rung(lambda r: r.step_s)
    )
    yield make.gauges(
        "moe_step_scope_share",
        "Share of a step's time by named scope, profiled once at warm-up",
        [*names, "scope"],
        [((r.name, r.phase, scope), share) for r in rungs for scope, share in r.scope_shares.items()],
    )
    yield make.gauges(
        "moe_routing_share",
        "Router, dispatch and combine in a step's time, profiled once at warm-up",
        names,
        [((r.name, r.phase), r.routing_share) for r in rungs if r.scope_shares],
    )
    yield make.gauges("moe_padding_share", "Padding in computed positions", ["phase"], _padding(rungs))


def _padding(rungs: Sequence[RungSnapshot]) -> list[Sample]:
    found: list[Sample] = []
    for phase in sorted({rung.phase for rung in rungs}):
        computed = sum(rung.computed_tokens for rung in rungs if rung.phase == phase)
        real = sum(rung.real_tokens for rung in rungs if rung.phase == phase)
        found.append(((phase,), (computed - real) / computed if computed else 0.0))
    return found


def _expert_families(layers: Sequence[Sequence[int]], make: _Labels) -> Iterator[Metric]:
    tokens = [
        ((str(layer), str(expert)), float(count))
        for layer, counts in enumerate(layers)
        for expert, count in enumerate(counts)
    ]
    yield make.counters("moe_expert_tokens", "Tokens routed to an expert", ["layer", "expert"], tokens)
    skew = [
        ((str(layer),), max(counts) * len(counts) / total if (total := sum(counts)) else 1.0)
        for layer, counts in enumerate(layers)
        if counts
    ]
    yield make.gauges("moe_expert_imbalance", "Busiest expert over the mean, since start", ["layer"], skew)


def _residency_families(found: ResidencyStatus, make: _Labels) -> Iterator[Metric]:
    """Only where part of the experts may sleep."""
    yield make.gauge("moe_resident_experts", "Experts in slots, all layers together", found.num_resident)
    memories = [(("device",), float(found.device_bytes)), (("host",), float(found.host_bytes))]
    yield make.gauges("moe_expert_bytes", "Memory of slots and of the host's store", ["memory"], memories)
    rows = [(("resident",), float(found.resident_rows)), (("asleep",), float(found.asleep_rows))]
    yield make.counters("moe_expert_rows", "Rows by where their expert was", ["expert"], rows)
    fetches = [
        (("late",), float(found.late_fetches)),
        (("ahead_used",), float(found.prefetches_used)),
        (("ahead_unused",), float(found.prefetches_unused)),
    ]
    yield make.counters("moe_expert_fetches", "Experts fetched from the host in a step", ["kind"], fetches)
    changes = [((reason,), float(num)) for reason, num in found.changes.items()]
    yield make.counters("moe_expert_residency_changes", "By reason", ["reason"], changes)


def _policy_families(s: EngineSnapshot, make: _Labels) -> Iterator[Metric]:
    yield make.gauge("moe_batch_size", "Most requests that run at once now", s.policy.batch_size)
    yield make.gauge(
        "moe_micro_batch_size", "Most requests in one prefill step now", s.policy.micro_batch_size
    )
    states = [((state.value,), float(state is s.ladder_change.state)) for state in LadderState]
    yield make.gauges("moe_ladder_state", "1 at the state of the ladder's last change", ["state"], states)


def _host_families(hosts: Sequence[HostStatus], make: _Labels) -> Iterator[Metric]:
    if hosts:
        up = [((str(host.host_id),), float(host.state == "up")) for host in hosts]
        yield make.gauges("moe_host_up", "1 while the host follows", ["host"], up)
        heard = [((str(host.host_id),), host.heard_s) for host in hosts if host.heard_s is not None]
        yield make.gauges("moe_host_heard_seconds", "Since the host's last sign", ["host"], heard)


def _control_families(found: ControlFigures, make: _Labels) -> Iterator[Metric]:
    yield make.gauge("moe_config_revision", "Revision of the configuration", found.revision)
    changes = [((result,), float(count)) for result, count in sorted(found.changes.items())]
    yield make.counters(
        "moe_config_changes", "Changes asked for, by what became of them", ["result"], changes
    )
    decisions = [(names, float(count)) for names, count in sorted(found.decisions.items())]
    names = ["controller", "reason"]
    yield make.counters("moe_controller_decisions", "Decisions of the controllers", names, decisions)
