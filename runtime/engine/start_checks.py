"""What a start asks of a configuration before anything is read or allocated, and what a later start would ask of another.

The model's word is final: what it rules out no machine can serve. The machine's word holds for now: another may have
more devices, so what this one rules out is only a warning for a start to come.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from runtime.cache.kv_pool import bytes_per_page
from runtime.config import EngineConfig, ModelConfig, ParallelConfig
from runtime.config_values import MAX_SIZE_BYTES
from runtime.engine.device_arrays import resident_slots
from runtime.engine.reconfigure import NO_START
from runtime.errors import InvalidRequest, ModelLoadError
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.step import StepShape
from runtime.mesh import check_sizes, mesh_devices
from runtime.model.architecture import Architecture
from runtime.xla_flags import check_overlap_flags


def check_next_start(config: EngineConfig, arch: Architecture) -> tuple[str, ...]:
    """For a configuration that is to be stored. Returns what would keep this machine, as it is now, from starting with it.

    Raises InvalidRequest, with field, value and what is allowed, for what the model rules out.
    """
    try:
        check_model(config, arch)
    except ModelLoadError as fault:
        raise InvalidRequest(fault.message, param=fault.param) from None
    return tuple(_machine_troubles(config))


def check_model(config: EngineConfig, arch: Architecture) -> None:
    """Raises ModelLoadError, with field, value and what is allowed, for what no machine could serve."""
    _check_leads(config.parallel)
    max_context = context_limit(config, arch)
    check_sizes(config.parallel, arch)
    resident_slots(config.experts, arch)
    shape = shard_shape(config, BucketLadder.from_config(config, max_context), max_context)
    budget = config.kv_cache.kv_cache_size.of(MAX_SIZE_BYTES)  # a share of more memory than there is
    page_bytes = bytes_per_page(arch, shape.page_size, weight_dtype(config.model))
    pages_in(budget, page_bytes // config.parallel.tensor_parallel_size, shape)


def context_limit(config: EngineConfig, arch: Architecture) -> int:
    """Longest prompt + output. Raises ModelLoadError when more is asked for than the model was made for."""
    own, wanted = arch.max_position_embeddings, config.model.max_context
    if wanted > own:
        raise ModelLoadError(
            f"model.max_context is {wanted}, the model's own limit is {own}", param="model.max_context"
        )
    return wanted or own


def weight_dtype(model: ModelConfig) -> DTypeLike:
    """Of weights and KV pages."""
    return jnp.bfloat16 if model.dtype == "bf16" else jnp.float32


def shard_shape(config: EngineConfig, ladder: BucketLadder, max_context: int) -> StepShape:
    """The shape of one shard: an equal part, rounded up, of what the configuration asks of all."""
    page_size, num_shards = config.kv_cache.page_size, config.parallel.expert_parallel_size
    num_slots = config.ladder.row_slots or config.batch_processing.max_batch_size
    max_tokens = max(ladder.prefill[-1].tokens, config.ladder.max_prefill_tokens)
    return StepShape(
        num_slots=-(-num_slots // num_shards),
        page_size=page_size,
        pages_per_row=-(-max_context // page_size),
        max_prefill_tokens=-(-max_tokens // num_shards),
    )


def pages_in(budget: int, page_bytes: int, shape: StepShape) -> int:
    """Pages, the dummy among them, of `budget` bytes; never more than twice what the rows need at full context.

    Raises ModelLoadError when the budget does not hold one request of full length.
    """
    useful = 2 * shape.num_slots * shape.pages_per_row
    num_pages = min(budget // page_bytes, useful) + 1
    if num_pages <= shape.pages_per_row:
        raise ModelLoadError(
            f"kv_cache.kv_cache_size gives {budget} bytes, {num_pages - 1} pages; one request of full context needs "
            f"{shape.pages_per_row} pages of {page_bytes} bytes",
            param="kv_cache.kv_cache_size",
        )
    return num_pages


def _check_leads(parallel: ParallelConfig) -> None:
    if parallel.host_id != 0:
        raise ModelLoadError(
            f"parallel.host_id is {parallel.host_id}; host 0 serves, the others are started as "
            "python -m runtime.engine.follower",
            param="parallel.host_id",
        )


def _machine_troubles(config: EngineConfig) -> Iterator[str]:
    """One sentence each. Memory is left out: most of it is taken by the engine that serves now."""
    parallel = config.parallel
    checks: list[Callable[[], object]] = []
    if parallel.hosts == jax.process_count():  # else the other hosts' devices are not known here
        checks.append(lambda: mesh_devices(parallel))
    if parallel.micro_batch_overlap != "off":
        checks.append(check_overlap_flags)
    for check in checks:
        try:
            check()
        except (ModelLoadError, ValueError) as trouble:
            yield f"{NO_START} on this machine as it is now: {trouble}"
