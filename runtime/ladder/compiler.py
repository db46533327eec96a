"""StepCompiler: lowers and compiles each rung from abstract shapes in a pool of threads, and remembers the result.

Nothing here holds weights or runs a step. A rung that fails to compile keeps its error and stays out of the ladder.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from runtime.cache.kv_pool import KVPool
from runtime.errors import CompileFailed, ModelLoadError
from runtime.experts.asleep import wake_expert
from runtime.experts.weights import MoEParams
from runtime.ladder.batch import abstract_packed
from runtime.ladder.bucket import Bucket
from runtime.ladder.host_rungs import HostRungs
from runtime.ladder.late_compiles import monitor
from runtime.ladder.mesh_steps import SHARDS, MeshSteps
from runtime.ladder.step import (
    SCORE_CHUNK,
    PrefillOutput,
    RowState,
    StepShape,
    decode_step,
    prefill_step,
    sample_step,
    score_step,
    start_row,
)
from runtime.model.architecture import Architecture
from runtime.model.params import Params, has_store
from runtime.model.sampling import SamplingState, pack_row, set_dense_row, set_mask, set_row
from runtime.request import SamplingParams
from runtime.schedule.plan import Phase

_COMMON_STEPS = ("start_row", "set_row", "set_dense_row", "set_mask", "score")  # any request may need them
MOVE_EXPERT = "move_expert"
WAKE_EXPERT = "wake_expert"


class RungState(StrEnum):
    """Life of one executable."""

    ABSENT = "absent"
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """One executable. `call` takes concrete arrays of exactly the shapes it was compiled for."""

    name: str
    state: RungState
    call: Callable[..., Any] | None = None
    compile_s: float = 0.0
    from_cache: bool = False
    temp_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class AbstractState:
    """Shapes of everything a step takes; trees of jax.ShapeDtypeStruct."""

    params: Params
    pool: KVPool
    rows: RowState
    sampling: SamplingState
    hidden: jax.ShapeDtypeStruct


class StepCompiler:
    """Owns the table name -> CompiledStep. Thread-safe: compiled by workers, read by the engine's thread."""

    def __init__(
        self,
        arch: Architecture,
        shape: StepShape,
        abstract: AbstractState,
        *,
        num_workers: int,
        mesh_steps: MeshSteps | None = None,
        others: HostRungs | None = None,
        on_done: Callable[[CompiledStep], None] = lambda step: None,
    ) -> None:
        """mesh_steps: the functions of several devices; None for one. `shape` is that of one shard.

        others: what other hosts must have compiled too. on_done: told of each end, in a worker's thread.
        """
        self._arch, self._shape, self._abstract, self._mesh = arch, shape, abstract, mesh_steps
        self._others, self._on_done = others, on_done
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="compile")
        self._lock = threading.Lock()
        self._steps: dict[str, CompiledStep] = {}
        self._futures: dict[str, Future[CompiledStep]] = {}
        self._wanted: set[str] = (
            set()
        )  # by the newest orders; what else still compiles is freed when it is done

    def compile(self, buckets: Iterable[Bucket]) -> list[Future[CompiledStep]]:
        """Queue the helpers that every launch needs, then the rungs in the given order with their samplers.

        What is ready or compiling is not queued again; what failed is tried once more.
        """
        jobs: list[tuple[str, Callable[[], Any]]] = self._common_jobs()
        for bucket in buckets:
            jobs.append((bucket.name, partial(self._lower_rung, bucket)))
            if (halves := self.in_halves(bucket)) is not None:
                jobs.append((halves.name, partial(self._lower_rung, halves)))
            if bucket.phase is Phase.PREFILL:
                jobs.append((sampler_name(bucket.rows), partial(self._lower_sampler, bucket.rows)))
        with self._lock:
            self._wanted |= dict(jobs).keys()
        return [self._submit(name, lower) for name, lower in dict(jobs).items() if self._claim(name)]

    def step(self, name: str) -> CompiledStep:
        return self._on_all_hosts(self._steps.get(name) or CompiledStep(name, RungState.ABSENT))

    def _on_all_hosts(self, step: CompiledStep) -> CompiledStep:
        """What is ready here and not elsewhere still compiles."""
        if self._others is None or step.state is not RungState.READY:
            return step
        if error := self._others.error(step.name):
            return replace(step, state=RungState.FAILED, call=None, error=error)
        return (
            step
            if self._others.is_everywhere(step.name)
            else replace(step, state=RungState.COMPILING, call=None)
        )

    def wait_for(self, name: str) -> None:
        """Until a step that compiles here is done: another host may have it already, and ask for it."""
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.result()

    def names_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The executables that a rung needs: itself, its sampler and the row writes."""
        sampler = (sampler_name(bucket.rows),) if bucket.phase is Phase.PREFILL else ()
        halves = self.in_halves(bucket)
        return (bucket.name, *((halves.name,) if halves else ()), *sampler, *self._common_names)

    def in_halves(self, bucket: Bucket) -> Bucket | None:
        """The rung's second form, as two micro-batches, where the engine is to choose between them."""
        if self._mesh is None or not self._mesh.has_halves or bucket.num_halves == 2:
            return None
        return bucket.in_halves(self._mesh.num_shards, self._shape.page_size)

    @property
    def _common_names(self) -> tuple[str, ...]:
        moves = (MOVE_EXPERT,) if self._mesh is not None and self._mesh.num_shards > 1 else ()
        wakes = (WAKE_EXPERT,) if has_store(self._abstract.params) else ()
        return (*_COMMON_STEPS, *moves, *wakes)

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether the rung can be launched."""
        return all(self.step(n).state is RungState.READY for n in self.names_of(bucket))

    def forget_all_but(self, buckets: Iterable[Bucket]) -> None:
        """Free the executables that none of the rungs needs, and start none of their compiles that still wait.

        A compile that runs cannot be stopped: it is freed when it ends, unless it is wanted again by then.
        """
        wanted = {name for bucket in buckets for name in self.names_of(bucket)}
        with self._lock:
            self._wanted = wanted
            if self._others is not None:
                self._others.keep_only(wanted)
            for name in [n for n in self._steps if n not in wanted]:
                future = self._futures.get(name)
                if future is None or future.done() or future.cancel():
                    del self._steps[name]
                    self._futures.pop(name, None)

    @property
    def steps(self) -> tuple[CompiledStep, ...]:
        """Everything in the table."""
        with self._lock:
            return tuple(map(self._on_all_hosts, self._steps.values()))

    @property
    def is_settled(self) -> bool:
        """Whether nothing that is wanted is compiling."""
        with self._lock:
            wanted = [self._on_all_hosts(s) for name, s in self._steps.items() if name in self._wanted]
        return all(s.state is not RungState.COMPILING for s in wanted)

    def wait_settled(self) -> None:
        """Until nothing is compiling, for those who have nothing else to do: asking again and again takes a core."""
        with self._lock:
            futures = tuple(self._futures.values())
        wait(futures)

    @property
    def first_error(self) -> str:
        """The first failed step with its error, or an empty text."""
        return next((f"{s.name}: {s.error}" for s in self.steps if s.error), "")

    def program(self, name: str) -> str:
        """The compiled text of a step, for reading; empty where it is not there or cannot be shown."""
        return getattr(self.step(name).call, "as_text", str)() or ""

    def call(self, name: str, *args: Any) -> Any:
        """Run a compiled step. Raises CompileFailed when it is not there: never compiles."""
        step = self.step(name)
        if step.call is None:
            raise CompileFailed(f"rung {name} is {step.state}{': ' + step.error if step.error else ''}")
        return step.call(*args)

    def shutdown(self) -> None:
        """Start no further compile; those that run go on in their threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _claim(self, name: str) -> bool:
        with self._lock:
            known = self._steps.get(name)
            if self._others is not None and known is not None and self._on_all_hosts(known).error:
                self._others.forget(
                    name
                )  # hosts that failed try once more, the others say again that they have it
            if known is not None and known.state is not RungState.FAILED:
                return False
            self._steps[name] = CompiledStep(name, RungState.COMPILING)
            return True

    def _submit(self, name: str, lower: Callable[[], Any]) -> Future[CompiledStep]:
        future = self._pool.submit(self._compile_one, name, lower)
        with self._lock:
            self._futures[name] = future
        return future

    def _compile_one(self, name: str, lower: Callable[[], Any]) -> CompiledStep:
        start = time.monotonic()
        try:
            with monitor.expected_compiles():
                monitor.take_cache_hits()
                compiled = lower().compile()
                from_cache = monitor.take_cache_hits() > 0
            memory = compiled.memory_analysis()
            step = CompiledStep(
                name,
                RungState.READY,
                compiled,
                time.monotonic() - start,
                from_cache,
                int(getattr(memory, "temp_size_in_bytes", 0) or 0),
            )
        except Exception as error:  # any compiler error must end as a failed rung, never as a dead worker
            text = f"{type(error).__name__}: {str(error)[:500]}"
            step = CompiledStep(name, RungState.FAILED, None, time.monotonic() - start, error=text)
        with self._lock:
            is_wanted = name in self._wanted
            if is_wanted:
                self._steps[name] = step
            else:
                self._steps.pop(name, None)
                self._futures.pop(name, None)
        if is_wanted:
            self._on_done(step)
        return step

    def _lower_rung(self, bucket: Bucket) -> Any:
        step, args = rung_step(self._arch, self._shape, bucket, self._abstract, self._mesh)
        return step.lower(*args)

    def _lower_sampler(self, num_rows: int) -> Any:
        a, by_shard = self._abstract, self._by_shard
        ints = by_shard((num_rows,), jnp.int32)
        prefilled = PrefillOutput(
            by_shard((num_rows, self._arch.vocab_size), jnp.float32),  # pyright: ignore
            ints,  # pyright: ignore
            by_shard((num_rows,), jnp.bool_),  # pyright: ignore
            ints,  # pyright: ignore
        )
        step = self._mesh.sampler() if self._mesh is not None else partial(sample_step, self._shape)
        return jax.jit(step, donate_argnums=(0, 1)).lower(a.rows, a.sampling, prefilled)

    def _lower_score(self) -> Any:
        targets = jax.ShapeDtypeStruct((SCORE_CHUNK,), jnp.int32)
        step = self._mesh.score() if self._mesh is not None else partial(score_step, self._arch)
        return jax.jit(step).lower(self._abstract.params, self._abstract.hidden, self._slot, targets)

    def _common_jobs(self) -> list[tuple[str, Callable[[], Any]]]:
        a, vocab = self._abstract, self._arch.vocab_size
        scalar, slot = jax.ShapeDtypeStruct((), jnp.int32), self._slot
        writes: dict[str, Callable[..., Any]] = {
            "start_row": start_row,
            "set_row": set_row,
            "set_dense_row": set_dense_row,
            "set_mask": set_mask,
        }
        if self._mesh is not None:
            writes = self._mesh.row_writes()

        def lower(name: str, *args: Any) -> tuple[str, Callable[[], Any]]:
            return name, lambda: jax.jit(writes[name], donate_argnums=(0,)).lower(*args)

        bias = jax.ShapeDtypeStruct((vocab,), jnp.float32)
        seen = jax.ShapeDtypeStruct((vocab,), jnp.bool_)
        counts = jax.ShapeDtypeStruct((vocab,), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, -(-vocab // 32)), jnp.int32)
        slots = (
            jax.ShapeDtypeStruct((1,), jnp.int32)
            if self._mesh is None
            else self._by_shard((1,), jnp.int32, 1)
        )
        jobs: list[tuple[str, Callable[[], Any]]] = [
            lower("start_row", a.rows, slot, scalar),
            lower("set_row", a.sampling, slot, pack_row(SamplingParams(), default_seed=0)),
            lower("set_dense_row", a.sampling, slot, bias, seen, counts),
            lower("set_mask", a.sampling, slots, mask),
            ("score", self._lower_score),
        ]
        if MOVE_EXPERT in self._common_names:
            assert self._mesh is not None
            jobs.append((MOVE_EXPERT, partial(self._mesh.lower_move, a.params)))
        if WAKE_EXPERT in self._common_names:
            jobs.append((WAKE_EXPERT, self._lower_wake))
        return jobs

    def _lower_wake(self) -> Any:
        """wake_expert, which serves all layers: their experts have one shape."""
        ffns = (layer.ffn for layer in self._abstract.params.layers)
        experts = next(ffn for ffn in ffns if isinstance(ffn, MoEParams))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        args = (experts.w_gate_up, experts.w_down, experts.store, number, number)
        return jax.jit(wake_expert, donate_argnums=(0, 1)).lower(*args)

    @property
    def _slot(self) -> jax.ShapeDtypeStruct:
        """The number of a row slot; with several shards one for each."""
        return jax.ShapeDtypeStruct((), jnp.int32) if self._mesh is None else self._by_shard((), jnp.int32, 1)

    def _by_shard(self, shape: tuple[int, ...], dtype: Any, extra: int = 0) -> jax.ShapeDtypeStruct:
        """An array that is cut by shard along axis 0; `extra` 1 puts an axis of the shards before `shape`."""
        if self._mesh is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        shape = (self._mesh.num_shards,) * extra + shape
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._mesh.sharding(SHARDS))


def rung_step(
    arch: Architecture,
    shape: StepShape,
    bucket: Bucket,
    abstract: AbstractState,
    mesh_steps: MeshSteps | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """(the jitted step of a rung, its abstract arguments); whatever it replaces is donated."""
    is_prefill = bucket.phase is Phase.PREFILL
    if mesh_steps is not None:
        step, packed = mesh_steps.rung(bucket), mesh_steps.abstract_packed(bucket)
    else:
        step = partial(prefill_step if is_prefill else decode_step, arch, shape, bucket)
        packed = abstract_packed(bucket, shape.pages_per_row)
    if is_prefill:
        args = (abstract.params, abstract.pool, abstract.hidden, packed)
        return jax.jit(step, donate_argnums=(1, 2)), args
    args = (abstract.params, abstract.pool, abstract.rows, abstract.sampling, packed)
    return jax.jit(step, donate_argnums=(1, 2, 3)), args


def sampler_name(num_rows: int) -> str:
    return f"sample-{num_rows}"


def enable_persistent_cache(folder: str) -> None:
    """Keep executables on disk between starts. The folder is trusted code: only the user may write to it."""
    if folder == "off":
        return
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "moe-ladder"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ModelLoadError(
            f"the compile cache {path.name} must belong to this user and be writable by nobody else: its content is run",
            param="cache_dir",
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
