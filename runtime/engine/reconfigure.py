"""From two configurations to a ConfigChange: what differs, how it takes effect, which rungs come and go. No JAX.

Nothing here changes anything: a plan may be shown, thrown away, or handed to `EngineLoop.configure`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from runtime.config import EngineConfig
from runtime.engine.change import ChangeKind, ConfigChange, FieldChange
from runtime.errors import InvalidRequest
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.learned import RungCost

# Fields that have no effect until the part that reads them is built, and why.
WITHOUT_EFFECT: Mapping[str, str] = {
    "batch_processing.expert_balance_weight": "on one device each expert has one copy: there is nothing to lean to",
    "batch_processing.expert_lean_between": "on one device all experts are equally loaded: there is nothing to lean to",
    "precision.dynamic_precision": "this version holds weights in one precision",
    "precision.load_threshold": "this version holds weights in one precision",
    "traffic_prediction.enable_traffic_prediction": "this version has no forecast",
    "traffic_prediction.prediction_window": "this version has no forecast",
}

JUDGES_FORMS = "parallel.judge_overlap_in_traffic"
NO_START = "the next start would fail"  # how a warning about it begins

WITH_SEVERAL_DEVICES = frozenset(
    {"batch_processing.expert_balance_weight", "batch_processing.expert_lean_between"}
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the arrays on the device have room for; fixed until a restart."""

    row_slots: int
    max_prefill_tokens: int
    max_context: int


def plan_change(
    old: EngineConfig,
    new: EngineConfig,
    ladder: BucketLadder,
    envelope: Envelope,
    cost_of: Callable[[Bucket], RungCost],
    check_start: Callable[[EngineConfig], Sequence[str]] = lambda new: (),
    must_start: bool = True,
) -> ConfigChange:
    """What `new` would change. `ladder` is the one that serves now.

    check_start: warnings about a start with `new`; raises InvalidRequest where there can be none, which is a warning too
    where not `must_start`.
    Raises InvalidRequest, `param` the field, where `new` does not fit into the envelope either.
    """
    fields = diff_fields(old, new)
    at_the_start = _start_warnings(new, check_start, must_start)
    effective = with_restart_fields_of(old, new)
    wanted = fitting_ladder(effective, envelope)
    add, drop = ladder.diff(wanted)
    costs = [cost_of(bucket) for bucket in add]
    workers = old.ladder.compile_workers
    return ConfigChange(
        fields=fields,
        rungs_to_add=tuple(b.name for b in add),
        rungs_to_drop=tuple(b.name for b in drop),
        compile_s=round(sum(c.compile_s for c in costs) / workers, 3),
        temp_bytes=max((c.temp_bytes for c in costs), default=0),
        warnings=(*_warnings(fields, new, wanted), *at_the_start),
    )


def diff_fields(old: EngineConfig, new: EngineConfig) -> tuple[FieldChange, ...]:
    """The fields that differ, in the order of the file, with values as a YAML file holds them."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return tuple(
        FieldChange(path, kind, before[path][1], value)
        for path, (kind, value) in after.items()
        if before[path][1] != value
    )


def with_restart_fields_of(running: EngineConfig, wanted: EngineConfig) -> EngineConfig:
    """`wanted` with every `restart` field as it is in `running`: what can hold without a restart.

    Raises InvalidRequest when the mixture is no valid configuration.
    """
    data = wanted.model_dump(mode="json")
    for change in diff_fields(running, wanted):
        if change.kind is ChangeKind.RESTART:
            section, name = change.path.split(".")
            data[section][name] = change.old
    try:
        return EngineConfig.model_validate(data)
    except ValidationError as error:
        text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise InvalidRequest(f"not without a restart: {text}", param=text.split(" ", 1)[0]) from None


def fitting_ladder(config: EngineConfig, envelope: Envelope) -> BucketLadder:
    """The ladder that `config` asks for. Raises InvalidRequest when it does not fit into the envelope."""
    max_rows = config.batch_processing.max_batch_size
    if max_rows > envelope.row_slots:
        raise InvalidRequest(
            f"batch_processing.max_batch_size is {max_rows}; the device has room for {envelope.row_slots} rows until "
            "ladder.row_slots is raised and the server restarted",
            param="batch_processing.max_batch_size",
        )
    ladder = BucketLadder.from_config(config, envelope.max_context, envelope.row_slots)
    largest = ladder.prefill[-1].tokens
    if largest > envelope.max_prefill_tokens:
        raise InvalidRequest(
            f"ladder.prefill_tokens has {largest}; the device has room for {envelope.max_prefill_tokens} until "
            "ladder.max_prefill_tokens is raised and the server restarted",
            param="ladder.prefill_tokens",
        )
    return ladder


def kind_of(section: str, name: str) -> ChangeKind:
    """How a change of a field takes effect."""
    model = EngineConfig.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    extra = model.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return ChangeKind(str(extra["change"]))


def _start_warnings(
    new: EngineConfig, check_start: Callable[[EngineConfig], Sequence[str]], must_start: bool
) -> Sequence[str]:
    try:
        return check_start(new)
    except InvalidRequest as fault:
        if must_start:
            raise
        return (f"{NO_START}: {fault.message}",)


def _leaves(config: EngineConfig) -> Iterator[tuple[str, tuple[ChangeKind, Any]]]:
    for section, fields in config.model_dump(mode="json").items():
        for name, value in fields.items():
            yield f"{section}.{name}", (kind_of(section, name), value)


def _warnings(fields: tuple[FieldChange, ...], new: EngineConfig, wanted: BucketLadder) -> Iterator[str]:
    for change in fields:
        is_shared = new.parallel.expert_parallel_size > 1 and change.path in WITH_SEVERAL_DEVICES
        if change.path in WITHOUT_EFFECT and not is_shared:
            yield f"{change.path} has no effect: {WITHOUT_EFFECT[change.path]}"
        is_of_sleep = change.path.startswith("experts.") and change.kind is ChangeKind.LIVE
        if is_of_sleep and new.experts.resident_experts == 0:
            yield f"{change.path} has no effect: experts.resident_experts is 0, all experts are resident"
        if change.path == JUDGES_FORMS and new.parallel.micro_batch_overlap != "auto":
            overlap = new.parallel.micro_batch_overlap
            yield f"{change.path} has no effect: parallel.micro_batch_overlap is {overlap}, only auto judges forms"
        if change.kind is ChangeKind.RESTART:
            yield f"{change.path} takes effect when the server is started again"
    changed = {change.path for change in fields}
    base, ceiling = "batch_processing.base_batch_size", "batch_processing.max_batch_size"
    batch = new.batch_processing
    if changed & {base, ceiling} and batch.base_batch_size > batch.max_batch_size:
        yield f"{base} of {batch.base_batch_size} is above {ceiling} of {batch.max_batch_size}, which will hold"
    if any(path.startswith("ladder.") for path in changed) and len(wanted.rungs) > new.ladder.max_rungs:
        yield f"the ladder would have {len(wanted.rungs)} rungs, more than ladder.max_rungs of {new.ladder.max_rungs}"
    if changed & {ceiling, "ladder.decode_rows"} and wanted.decode[-1].rows < batch.max_batch_size:
        yield (
            f"the largest decode rung has {wanted.decode[-1].rows} rows: {ceiling} of {batch.max_batch_size} "
            "cannot be reached"
        )
