"""EngineConfig: the whole configuration as one frozen pydantic model, read from one YAML file. Imports no JAX.

Every field says how a change takes effect: `live` (next step), `recompile` (rungs compiled in the background,
swapped between steps) or `restart`. Durations are written `500ms`, `2s`, `15min`; sizes `80%`, `20GiB`.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from runtime.config_experts import ExpertsConfig
from runtime.config_fields import Section as _Section
from runtime.config_fields import live as _live
from runtime.config_fields import recompile as _recompile
from runtime.config_fields import restart as _restart
from runtime.config_values import Duration, SizeField, UtcTime, parse_address

RungSize = Annotated[int, Field(ge=1, le=1 << 16)]
HostTimeout = Annotated[Duration, Field(ge=1, le=3600)]
MAX_RUNGS = 256  # of a phase: each is a compile and an executable in memory


class ModelConfig(_Section):
    """Which weights are served."""

    path: str = _restart("", "folder in Hugging Face layout; empty means the embedded model")
    served_name: str = _restart("", "name in the API; empty means the folder's name", max_length=256)
    aliases: tuple[str, ...] = _restart((), "further names that the API accepts for the model")
    load_format: Literal["auto", "dummy"] = _restart(
        "auto", "dummy: seeded random weights from config.json alone"
    )
    dtype: Literal["bf16", "fp32"] = _restart("bf16", "precision of weights and KV")
    max_context: int = _restart(0, "longest prompt + output; 0: the model's own limit", ge=0, le=1 << 20)


class ServerConfig(_Section):
    """The HTTP endpoint and its limits."""

    host: str = _restart("127.0.0.1", "address to listen on; loopback by default")
    port: int = _restart(8000, "port of the endpoint", ge=0, le=65535)
    api_keys: tuple[str, ...] = _restart((), "SHA-256 hex digests of accepted keys; empty: no key needed")
    admin_keys: tuple[str, ...] = _restart(
        (), "SHA-256 hex digests of operators' keys for /admin; empty: refused"
    )
    viewer_keys: tuple[str, ...] = _restart(
        (), "SHA-256 hex digests of keys that may read /admin, not change"
    )
    demo: bool = _restart(False, "admin routes need no key, on a loopback address only")
    state_dir: str = _restart(
        "", "folder of config versions and audit; empty: ~/.local/state/moe-ladder/PORT; 'off': none"
    )
    max_body_size: SizeField = _restart("2MiB", "larger request bodies are refused before they are read")
    max_prompt_bytes: int = _live(400_000, "longer prompts are refused before tokenising", ge=1, le=1 << 40)
    max_n: int = _live(16, "largest n", ge=1, le=128)
    max_queued_requests: int = _live(512, "requests waiting before 429", ge=1, le=1 << 20)
    max_queued_tokens: int = _live(1 << 20, "prompt + output tokens waiting before 429", ge=1, le=1 << 40)
    queue_timeout: Duration = _live("120s", "longest wait in the queue before 429")
    drain_delay: Duration = _live("2s", "time between not ready and no admission on SIGTERM")
    drain_timeout: Duration = _live("30s", "longest wait for running requests on SIGTERM")


class BatchProcessingConfig(_Section):
    """Batch sizes and windows; the keys and start values that people know."""

    enable_dynamic_batch: bool = _live(True, "let the controller choose the batch size")
    base_batch_size: int = _live(32, "start of the batch-size formula", ge=1, le=4096)
    max_batch_size: int = _recompile(
        32, "rows of the largest decode rung; at most ladder.row_slots", ge=1, le=4096
    )
    dynamic_adjust_window: Duration = _live("500ms", "time between decisions of the batch size")
    expert_load_threshold: float = _live(
        0.75, "busiest device's load above which experts are rebalanced", gt=0, le=1
    )
    micro_batch_size: int = _live(16, "requests of one micro-batch", ge=1, le=4096)
    dynamic_batch_window: Duration = _live("50ms", "time between decisions of the micro-batch size")
    max_micro_batch_size: int = _live(32, "largest micro-batch", ge=1, le=4096)
    expert_balance_weight: float = _live(
        0.5,
        "how unequally copies of an expert may share a step's rows, to level the devices; no text changes",
        ge=0,
        le=0.5,
    )
    expert_lean_between: float = _live(
        0.0,
        "how far the choice of experts may lean to those on less loaded devices; above 0 the text changes",
        ge=0,
        le=0.5,
    )
    alpha: float = _live(0.5, "gain of the batch-size formula", ge=0, le=1)
    smoothing: bool = _live(True, "damp changes of the batch size")


class ControllerConfig(_Section):
    """How the controllers judge and how fast they move."""

    form: Literal["current", "published"] = _live(
        "current", "factor on the current batch size, or on base_batch_size as published"
    )
    up_below: float = _live(
        0.9, "the size may rise while load is below this share of the threshold", gt=0, le=1
    )
    down_above: float = _live(1.0, "the size may fall while load is above this share", gt=0, le=2)
    kv_threshold: float = _live(
        0.95, "share of KV pages in use that counts as much as expert_load_threshold", gt=0, le=1
    )
    dwell: Duration = _live("1s", "shortest time between two moves of one number when smoothing is on")
    stale_after: Duration = _live("2s", "older observations change nothing")
    expected_len_quantile: float = _live(
        0.9, "quantile of recent request lengths that memory is kept for", gt=0, lt=1
    )
    ttft_slack: float = _live(
        0.5, "share of slo.ttft after which a waiting request goes before decoding", ge=0, le=1
    )
    like_lengths: bool = _live(True, "prefill requests of like length together within the window")
    length_multiple: int = _live(64, "lengths that round up to one multiple are alike", ge=1, le=4096)
    decisions_kept: int = _restart(8192, "decisions kept to be looked at", ge=64, le=1 << 20)

    @model_validator(mode="after")
    def _keep_a_gap(self) -> Self:
        if self.up_below >= self.down_above:
            raise ValueError(
                f"controller.up_below is {self.up_below}, down_above {self.down_above}: up_below must be smaller, "
                "or the size would move to and fro"
            )
        return self


class SloConfig(_Section):
    """What users were promised."""

    ttft: Duration = _live("2s", "time to first token", gt=0)
    itl: Duration = _live("100ms", "time between tokens", gt=0)


class ParallelConfig(_Section):
    """Devices, and how tokens get to the experts that they hold."""

    expert_parallel_size: int = _restart(
        1, "devices that share the experts; each holds rows and KV pages of its own", ge=1, le=4096
    )
    tensor_parallel_size: int = _restart(1, "devices that share each product", ge=1, le=4096)
    redundant_experts: int = _restart(
        0, "expert slots of a layer beyond its experts, for copies of busy ones", ge=0, le=4096
    )
    exchange: Literal["auto", "gather", "all_to_all", "ragged"] = _recompile(
        "auto", "way of the tokens to their experts; auto: gather for small steps, all_to_all for others"
    )
    gather_max_tokens: int = _recompile(
        128, "tokens of the largest rung that auto lets gather", ge=0, le=1 << 16
    )
    capacity_factor: float = _restart(
        1.5,
        "room of one round of all_to_all, times an even spread; the rest goes in further rounds",
        gt=0,
        le=64,
    )
    dispatch_dtype: Literal["model", "bf16", "fp8"] = _restart(
        "model", "type in which tokens travel to their experts; model: as the weights"
    )
    micro_batch_overlap: Literal["off", "auto", "on"] = _restart(
        "off",
        "two micro-batches a step; auto: in each rung where measurements say that it pays",
    )
    judge_overlap_in_traffic: bool = _live(
        True, "auto: let a rung's two forms take turns in traffic now and then; false: the warm-up decides"
    )
    moves_per_step: int = _live(2, "expert weights moved between two steps at most", ge=1, le=1024)
    hosts: int = _restart(
        1, "processes that share the devices; host 0 serves, the others follow it", ge=1, le=256
    )
    host_id: int = _restart(0, "which of the hosts this process is; 0 leads", ge=0, le=255)
    coordinator: str = _restart(
        "", "host:port of host 0 for JAX's coordination; the next port carries commands", max_length=255
    )
    command_port: int = _restart(
        0, "port of host 0 for commands to the others; 0: the coordinator's and one", ge=0, le=65535
    )
    host_timeout: HostTimeout = _restart("10s", "silence after which another host counts as gone")
    host_start_timeout: HostTimeout = _restart("2min", "longest wait for the other hosts at the start")

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Raises ValueError for what is not host:port."""
        return parse_address(self.coordinator)

    @property
    def command_address(self) -> tuple[str, int]:
        host, port = self.coordinator_address
        return host, self.command_port or port + 1

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.host_id >= self.hosts:
            raise ValueError(
                f"parallel.host_id is {self.host_id}; with parallel.hosts of {self.hosts} it is at most {self.hosts - 1}"
            )
        num_devices = self.expert_parallel_size * self.tensor_parallel_size
        if num_devices % self.hosts:
            raise ValueError(
                f"parallel.hosts is {self.hosts}; expert_parallel_size {self.expert_parallel_size} x "
                f"tensor_parallel_size {self.tensor_parallel_size} makes {num_devices} devices, which do not divide "
                "into so many hosts"
            )
        if self.hosts > 1 or self.coordinator:
            try:
                self.coordinator_address  # noqa: B018 - raises
            except ValueError as error:
                raise ValueError(f"parallel.coordinator: {error}") from None
            if self.command_address[1] == self.coordinator_address[1]:
                raise ValueError(
                    f"parallel.command_port is {self.command_port}, the coordinator's own port; another one is needed"
                )
        return self


class KvCacheConfig(_Section):
    """KV memory."""

    kv_cache_external: bool = _restart(False, "keep prefixes outside device memory too")
    kv_cache_size: SizeField = _restart(
        "80%", "device memory left after the weights that KV may take, or a size"
    )
    levels: int = _restart(3, "KV levels when external", ge=1, le=3)
    l1_size: SizeField = _restart("20%", "share of the device level")
    l2_size: SizeField = _restart("50%", "share of the host level")
    l3_size: SizeField = _restart("30%", "share of the shared store")
    page_size: int = _restart(16, "tokens of one page", ge=1, le=256)
    enable_prefix_cache: bool = _live(True, "share pages between requests that start alike")


class PrecisionConfig(_Section):
    """Precision by load."""

    dynamic_precision: bool = _live(True, "switch precision by load where the backend has both")
    load_threshold: float = _live(0.85, "load above which low_precision is used", gt=0, le=1)
    high_precision: Literal["bf16", "fp16", "fp32"] = _restart("bf16", "precision below the threshold")
    low_precision: Literal["fp8", "int8", "bf16"] = _restart("fp8", "precision above the threshold")


class TrafficPredictionConfig(_Section):
    """Forecast of traffic."""

    enable_traffic_prediction: bool = _live(True, "use the forecast where it beats plain ones")
    prediction_window: Duration = _live("15min", "how far ahead")
    prediction_model_path: str = _restart("", "folder of the forecast model")


class LadderConfig(_Section):
    """The shapes that are compiled, and nothing else is."""

    prefill_tokens: tuple[RungSize, ...] = _recompile(
        (), "token counts of the prefill rungs; empty: chosen by rule", max_length=MAX_RUNGS
    )
    decode_rows: tuple[RungSize, ...] = _recompile(
        (), "row counts of the decode rungs; empty: chosen by rule", max_length=MAX_RUNGS
    )
    max_prefill_tokens: int = _restart(512, "tokens of the largest prefill rung", ge=16, le=1 << 16)
    max_prefill_rows: int = _recompile(16, "chunks in one prefill step", ge=1, le=256)
    row_slots: int = _restart(
        0,
        "rows that the device has room for: the ceiling of max_batch_size; 0: max_batch_size at start",
        ge=0,
        le=4096,
    )
    max_rungs: int = _live(24, "rungs of a learned ladder, both phases together", ge=2, le=256)
    max_decode_steps: int = _live(8, "decode steps in one launch where nothing needs the host", ge=1, le=16)
    compile_workers: int = _restart(2, "threads that compile rungs", ge=1, le=64)
    cache_dir: str = _restart(
        "", "folder of the persistent compile cache; empty: ~/.cache/moe-ladder; 'off': none"
    )


class ConsoleConfig(_Section):
    """What the operator console may see."""

    request_timeline: bool = _live(True, "keep times, rungs and counts of the last 2048 requests, never text")


def _price(description: str) -> Any:
    return _live(0.0, description, ge=0, le=1_000_000)


class EconomicsConfig(_Section):
    """Prices in USD; they steer nothing. All 0: not set."""

    input_price: float = _price("a million input tokens that were computed")
    cached_input_price: float = _price("a million input tokens that were found in the prefix cache")
    output_price: float = _price("a million output tokens")
    worker_price: float = _price("an hour of this worker, all its devices together")
    effective_from: UtcTime = _live(
        "", "since when the prices hold, for example 2026-12-01T00:00:00Z; empty: from the change on"
    )


class EngineConfig(_Section):
    """The whole configuration; replaced, never edited."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    batch_processing: BatchProcessingConfig = BatchProcessingConfig()
    controller: ControllerConfig = ControllerConfig()
    slo: SloConfig = SloConfig()
    parallel: ParallelConfig = ParallelConfig()
    experts: ExpertsConfig = ExpertsConfig()
    kv_cache: KvCacheConfig = KvCacheConfig()
    precision: PrecisionConfig = PrecisionConfig()
    traffic_prediction: TrafficPredictionConfig = TrafficPredictionConfig()
    ladder: LadderConfig = LadderConfig()
    console: ConsoleConfig = ConsoleConfig()
    economics: EconomicsConfig = EconomicsConfig()

    @model_validator(mode="after")
    def _refuse_what_is_not_built(self) -> Self:
        """A setting that would be ignored is an error: the operator would believe in it."""
        wanted = {
            "kv_cache.kv_cache_external": (self.kv_cache.kv_cache_external, False),
        }
        for name, (value, only) in wanted.items():
            if value != only:
                raise ValueError(f"{name} is {value}; this version is built for {only} only")
        if self.server.max_body_size.num_bytes is None:
            raise ValueError("server.max_body_size must be a size in bytes, for example 2MiB")
        self._check_residency()
        slots = self.ladder.row_slots
        if slots and self.batch_processing.max_batch_size > slots:
            raise ValueError(
                f"batch_processing.max_batch_size is {self.batch_processing.max_batch_size}, more than "
                f"ladder.row_slots of {slots}"
            )
        if max(self.ladder.decode_rows, default=0) > self.batch_processing.max_batch_size:
            raise ValueError(
                f"ladder.decode_rows has {max(self.ladder.decode_rows)}, more than "
                f"batch_processing.max_batch_size of {self.batch_processing.max_batch_size}"
            )
        return self

    def _check_residency(self) -> None:
        resident, parallel = self.experts.resident_experts, self.parallel
        for name in ("expert_parallel_size", "tensor_parallel_size"):
            if resident and getattr(parallel, name) > 1:
                raise ValueError(
                    f"experts.resident_experts is {resident} and parallel.{name} {getattr(parallel, name)}; experts "
                    "sleep on one device only: 0, or 1 of the other"
                )
        if self.experts.prefetch_experts and not resident:
            raise ValueError(
                f"experts.prefetch_experts is {self.experts.prefetch_experts}; 0 only while "
                "experts.resident_experts is 0: all experts are resident"
            )

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _refuse_unknown_keys(cls, data, "")
        return data


def _refuse_unknown_keys(model: type[BaseModel], data: dict[Any, Any], path: str) -> None:
    for key, value in data.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            near = difflib.get_close_matches(str(key), model.model_fields, n=1, cutoff=0.0)
            raise ValueError(f"unknown key {path}{str(key)[:80]!s}; the nearest known key is {path}{near[0]}")
        section = field.annotation
        if isinstance(value, dict) and isinstance(section, type) and issubclass(section, BaseModel):
            _refuse_unknown_keys(section, value, f"{path}{key}.")


def load_config(path: Path, overrides: Callable[[dict[str, Any]], None] | None = None) -> EngineConfig:
    """EngineConfig from a YAML file. Raises ValueError with one line per wrong field."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    if overrides is not None:
        overrides(data)
    return parse_config(data, source=str(path))


def parse_config(data: dict[str, Any], source: str = "config") -> EngineConfig:
    """EngineConfig from plain data. Raises ValueError that names each field, its value and what is allowed."""
    try:
        return EngineConfig.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or source}: {e['msg'].removeprefix('Value error, ')}"
            + (f" (got {str(e['input'])[:80]!r})" if e["loc"] else "")
            for e in error.errors()[:10]
        ]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None
