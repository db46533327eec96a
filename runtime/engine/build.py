"""build_engine: from a configuration to an engine that can be started, in one place.

What is quick (config.json, tokenizer, template) happens at once and fails at once; weights, pages and compiles are
left to the loop's thread, so that HTTP can say "loading" meanwhile.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from pallas_kernels.backend import choose_backend
from pallas_kernels.expert_mlp.op import IMPLEMENTATIONS
from runtime.cache.kv_pool import bytes_per_page
from runtime.config import EngineConfig, KvCacheConfig
from runtime.engine.chat_template import ChatTemplate
from runtime.engine.device_arrays import (
    DeviceArrays,
    residency_shape,
    resident_slots,
    start_placement,
    weight_specs,
)
from runtime.engine.device_kind import check_same_devices, device_kind
from runtime.engine.device_work import DeviceWork
from runtime.engine.distributed import start_distributed
from runtime.engine.engine import Engine
from runtime.engine.expert_mover import ExpertMover
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.host_greeting import make_greeting, shaping_sections
from runtime.engine.leader import NO_HOSTS, Leader
from runtime.engine.loaded import Loaded
from runtime.engine.loop import EngineLoop
from runtime.engine.residency_shape import ResidencyShape
from runtime.engine.start_checks import check_model, context_limit, pages_in, shard_shape, weight_dtype
from runtime.engine.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from runtime.errors import ModelLoadError
from runtime.experts.placement import ExpertPlacement
from runtime.ladder.compiler import CompiledStep, StepCompiler, enable_persistent_cache
from runtime.ladder.host_rungs import HostRungs
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.late_compiles import monitor
from runtime.ladder.mesh_steps import MeshSteps
from runtime.ladder.step import StepShape
from runtime.mesh import DeviceMesh, make_device_mesh
from runtime.model.architecture import Architecture, load_architecture
from runtime.model.checkpoint import load_params
from runtime.model.params import Params, init_params
from runtime.model.spec import Place, device_nbytes, tree_nbytes
from runtime.schedule.request_checks import ModelLimits
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.shards import AnyScheduler, ShardedScheduler
from runtime.xla_flags import settle_flags

EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "demo-moe"
DUMMY_SEED = 0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the API tells about the model. `created` is Unix seconds."""

    name: str
    max_context: int
    vocab_size: int
    created: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that can be started, with what its users need beside it."""

    loop: EngineLoop
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    grammars: GrammarCompiler
    card: ModelCard


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Raises ModelLoadError when the folder is not a model that can be served."""
    settle_flags(config.parallel.micro_batch_overlap)
    path = model_folder(config)
    arch = load_architecture(path)
    check_model(config, arch)
    tokenizer = _tokenizer(config, path, arch)
    max_context = context_limit(config, arch)
    grammars = GrammarCompiler(tokenizer, arch.vocab_size)
    leader = None
    if config.parallel.hosts > 1:
        leader = Leader(config.parallel, make_greeting(config, path), shaping_sections(config))
    loop = EngineLoop(
        config,
        ModelLimits(max_context, arch.vocab_size),
        tokenizer,
        grammars,
        load=partial(load_engine, config, path, arch, tokenizer.eos_ids, max_context, leader),
        hosts=leader or NO_HOSTS,
    )
    card = ModelCard(
        name=config.model.served_name or path.name,
        max_context=max_context,
        vocab_size=arch.vocab_size,
        created=int(time.time()),
        aliases=config.model.aliases,
    )
    return BuiltEngine(loop, tokenizer, ChatTemplate.from_folder(path), grammars, card)


def model_folder(config: EngineConfig) -> Path:
    """Raises ModelLoadError where there is no model."""
    path = Path(config.model.path) if config.model.path else EMBEDDED_MODEL
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path.name}: no config.json in the model folder")
    return path


def _tokenizer(config: EngineConfig, path: Path, arch: Architecture) -> Tokenizer:
    """The folder's; a dummy model without one reads bytes, so that a bare config.json can be measured."""
    if config.model.load_format == "dummy" and not (path / "tokenizer.json").is_file():
        return ByteTokenizer(arch.vocab_size)
    return HFTokenizer(path)


def load_engine(
    config: EngineConfig,
    path: Path,
    arch: Architecture,
    eos_ids: tuple[int, ...],
    max_context: int,
    leader: Leader | None = None,
) -> Loaded:
    """Weights, pages and the first compiles; runs in the engine's thread. leader: of several hosts, awaited first."""
    if leader is not None:
        leader.gather()
        start_distributed(config.parallel)
    found = load_devices(config, path, arch, max_context, leader, others=leader and leader.rungs)
    engine = Engine(arch, found.shape, found.ladder, found.work, eos_ids, leader)
    engine.forms.is_forced = config.parallel.micro_batch_overlap == "on"
    scheduler = _make_scheduler(config, engine, found.num_pages, max_context, eos_ids)
    mover = ExpertMover(engine, found.placement) if found.placement is not None else None
    return Loaded(engine, scheduler, mover, found.residency)


class OtherHosts(Protocol):
    """What loading asks of the others."""

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all hosts say."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedDevices:
    """What every host has of an engine. num_pages: of one shard."""

    work: DeviceWork
    shape: StepShape
    ladder: BucketLadder
    placement: ExpertPlacement | None
    num_pages: int
    residency: ResidencyShape | None = None  # where experts may sleep


def load_devices(
    config: EngineConfig,
    path: Path,
    arch: Architecture,
    max_context: int,
    hosts: OtherHosts | None = None,
    *,
    others: HostRungs | None = None,
    on_compiled: Callable[[CompiledStep], None] = lambda step: None,
) -> LoadedDevices:
    """This host's part of the arrays, and the first compiles ordered."""
    with monitor.expected_compiles():
        # Settled before anything is traced: the native backend may have to be compiled first.
        backend = choose_backend(tuple(IMPLEMENTATIONS))
        log.info("products: %s", backend.reason)
        if hosts is not None:
            check_same_backend(backend.name, hosts)
            check_same_devices(device_kind(), hosts)
        enable_persistent_cache(config.ladder.cache_dir)
        dtype = weight_dtype(config.model)
        mesh = make_device_mesh(config.parallel, arch)
        ladder = BucketLadder.from_config(config, max_context)
        shape = shard_shape(config, ladder, max_context)
        placement = start_placement(config.parallel, arch)
        resident = resident_slots(config.experts, arch)
        specs = weight_specs(arch, dtype, placement, resident)
        num_pages = count_pages(config.kv_cache, arch, shape, dtype, specs, mesh)
        if hosts is not None:
            num_pages = hosts.smallest(num_pages)
        weight = config.batch_processing.expert_balance_weight
        arrays = DeviceArrays(arch, shape, num_pages, dtype, mesh, placement, resident, weight)
        compiler = StepCompiler(
            arch,
            shape,
            arrays.abstract_state(),
            num_workers=config.ladder.compile_workers,
            mesh_steps=MeshSteps(mesh, shape, config.parallel, arrays.cuts()) if mesh is not None else None,
            others=others,
            on_done=on_compiled,
        )
        compiler.compile(ladder.compile_order())  # compiling and loading share the time
        try:
            state = arrays.make_state(_load_weights(config, path, arch, dtype, arrays.place))
            jax.block_until_ready((state.pool, state.sampling))
        except BaseException:
            compiler.shutdown()
            raise
    residency = resident and residency_shape(arch, specs, resident)
    work = DeviceWork(compiler, state, mesh)
    return LoadedDevices(work, shape, ladder, placement, num_pages, residency)


def check_same_backend(name: str, hosts: OtherHosts) -> None:
    """Raises ModelLoadError, on all hosts, where they would compute their products with different kernels."""
    names = sorted(IMPLEMENTATIONS)
    own = names.index(name)
    first, last = hosts.smallest(own), -hosts.smallest(-own)
    if first != last:
        raise ModelLoadError(
            f"parallel.hosts: products are computed by {names[first]} on one host and by {names[last]} on another; this one "
            f"has {name} (MOE_LADDER_DISABLE_BACKENDS switches one off)",
            param="parallel.hosts",
        )


def _make_scheduler(
    config: EngineConfig, engine: Engine, num_pages: int, max_context: int, eos_ids: tuple[int, ...]
) -> AnyScheduler:
    settings: dict[str, Any] = {
        "page_size": engine.shape.page_size,
        "num_pages": num_pages,
        "num_rows": engine.shape.num_slots,
        "max_context": max_context,
        "enable_prefix_cache": config.kv_cache.enable_prefix_cache,
        "limits": engine.limits,
        "eos_token_ids": frozenset(eos_ids),
    }
    if engine.num_shards == 1:
        return Scheduler(**settings)
    return ShardedScheduler(engine.num_shards, **settings)


def count_pages(
    kv: KvCacheConfig,
    arch: Architecture,
    shape: StepShape,
    dtype: DTypeLike,
    specs: Params,
    mesh: DeviceMesh | None = None,
) -> int:
    """Pages that the budget of one device holds. specs: all weights. Raises ModelLoadError as `pages_in` does."""
    memory, page_bytes = device_memory_bytes(), bytes_per_page(arch, shape.page_size, dtype)
    if mesh is None:
        weights = weight_nbytes(specs)
    else:
        weights, page_bytes = mesh.part_nbytes(specs), page_bytes // mesh.num_tensor
        if jax.default_backend() == "cpu":  # virtual devices share the machine's memory
            memory //= mesh.num_local
    budget = kv.kv_cache_size.of(max(0, memory - weights))
    return pages_in(budget, page_bytes, shape)


def weight_nbytes(specs: Params) -> int:
    """Bytes of the weights in the memory that pages come from: on a CPU the host's memory is that memory too."""
    return tree_nbytes(specs) if jax.default_backend() == "cpu" else device_nbytes(specs)


def device_memory_bytes() -> int:
    """Memory of one device that is not in use; on a CPU what the machine can give now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():  # unlike SC_AVPHYS_PAGES this counts file cache that can be dropped
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _load_weights(
    config: EngineConfig, path: Path, arch: Architecture, dtype: DTypeLike, place: Place
) -> Params:
    if config.model.load_format == "dummy":
        return init_params(arch, dtype, DUMMY_SEED, place)
    return load_params(path, arch, dtype, place=place)
