"""The compiled functions on a mesh: each wraps the one-device function of `step.py` in `shard_map`.

A shard is a one-device engine: its rows, dummy slot, pages and dummy page are its own, and it computes its part of the
rung. Only the expert layers look beyond it. State arrays hold the shards one after another along axis 0; a number that
is meant for one shard comes as an array with one entry a shard, where the others get their dummy slot.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from runtime.config import ParallelConfig
from runtime.experts.exchange_spec import Exchange, choose_capacity
from runtime.experts.layer import ExpertLoad
from runtime.experts.move import move_experts
from runtime.experts.move_order import SLOTS_A_TRANSFER
from runtime.experts.weights import MoEParams
from runtime.experts.wire import FP8
from runtime.ladder.batch import packed_len
from runtime.ladder.bucket import Bucket
from runtime.ladder.step import (
    StepOutput,
    StepShape,
    decode_step,
    prefill_step,
    sample_step,
    score_step,
    start_row,
)
from runtime.mesh import EXPERT_AXIS, TENSOR_AXIS, DeviceMesh, slots_per_device
from runtime.model.params import Params
from runtime.model.sampling import Logprobs, set_dense_row, set_mask, set_row
from runtime.model.sharding import LayerSharding
from runtime.schedule.plan import Phase

SHARDS = P(EXPERT_AXIS)
POOL = P(EXPERT_AXIS, None, TENSOR_AXIS)  # pages by shard, heads by tensor shard
EVERYWHERE = P()
BY_COLUMN = P(None, EXPERT_AXIS)
LOAD = ExpertLoad(tokens=EVERYWHERE, rows=BY_COLUMN)  # pyright: ignore
OUTPUT = StepOutput(tokens=P(None, None, EXPERT_AXIS), logprobs=Logprobs(BY_COLUMN, BY_COLUMN, BY_COLUMN))  # pyright: ignore
DISPATCH_DTYPES = {"model": None, "bf16": jnp.dtype(jnp.bfloat16), "fp8": jnp.dtype(FP8)}


class MeshSteps:
    """Makes the functions that `StepCompiler` lowers, for one mesh and model."""

    def __init__(self, mesh: DeviceMesh, shape: StepShape, parallel: ParallelConfig, params: Params) -> None:
        """params: how each weight is cut, as PartitionSpecs."""
        self._mesh, self._shape, self._parallel, self._params = mesh, shape, parallel, params

    def rung(self, bucket: Bucket) -> Callable[..., Any]:
        """prefill_step or decode_step with the arguments of `StepCompiler`'s call; packed is [shards, N]."""
        local, sharding = bucket.share(self._mesh.num_shards), self._sharding(bucket)
        kind = prefill_step if bucket.phase is Phase.PREFILL else decode_step
        step = partial(kind, self._mesh.local_arch, self._shape, local, sharding=sharding)

        def run(*args: Array) -> tuple[Any, ...]:
            *state, packed = args
            *results, load = step(*state, packed[0])
            tokens = lax.psum(load.tokens, EXPERT_AXIS) if sharding.exchange else load.tokens
            return *results, ExpertLoad(tokens, load.rows)

        if bucket.phase is Phase.PREFILL:
            return self._wrap(run, (self._params, POOL, SHARDS, SHARDS), (POOL, SHARDS, SHARDS), LOAD)
        ins = (self._params, POOL, SHARDS, SHARDS, SHARDS)
        return self._wrap(run, ins, (POOL, SHARDS, SHARDS), OUTPUT, LOAD)

    def sampler(self) -> Callable[..., Any]:
        return self._wrap(partial(sample_step, self._shape), SHARDS, (SHARDS, SHARDS), OUTPUT)

    def score(self) -> Callable[..., Any]:
        """Every shard scores the positions from its own offset; results stand one shard after another."""

        def run(params: Params, hidden: Array, offset: Array, targets: Array) -> Any:
            return score_step(self._mesh.local_arch, params, hidden, offset[0], targets)

        return self._wrap(run, (self._params, SHARDS, SHARDS, EVERYWHERE), (), SHARDS, SHARDS, SHARDS)

    def row_writes(self) -> dict[str, Callable[..., Any]]:
        """The small writes of row state; the slot comes as one number a shard."""

        def at_slot(write: Callable[..., Any], num_values: int) -> Callable[..., Any]:
            def run(state: Any, slots: Array, *values: Any) -> Any:
                return write(state, slots[0], *values)

            return self._wrap(run, (SHARDS, SHARDS, *[EVERYWHERE] * num_values), SHARDS)

        return {
            "start_row": at_slot(start_row, 1),
            "set_row": at_slot(set_row, 1),
            "set_dense_row": at_slot(set_dense_row, 3),
            "set_mask": at_slot(set_mask, 1),
        }

    def lower_move(self, params: Params) -> Any:
        """move_experts, which serves all layers: their experts have one shape. params: the weights as shapes."""
        pairs = zip(params.layers, self._params.layers, strict=True)
        experts, cut = next(
            (a.ffn, p.ffn) for a, p in pairs if isinstance(a.ffn, MoEParams) and isinstance(p.ffn, MoEParams)
        )
        cuts = (cut.w_gate_up, cut.w_down, cut.copies)
        run = self._wrap(partial(move_experts, axis=EXPERT_AXIS), (*cuts, EVERYWHERE), cuts)
        order = jax.ShapeDtypeStruct((2 * SLOTS_A_TRANSFER + experts.copies.size,), jnp.int32)
        args = (experts.w_gate_up, experts.w_down, experts.copies, order)
        return jax.jit(run, donate_argnums=(0, 1, 2)).lower(*args)

    @property
    def num_shards(self) -> int:
        return self._mesh.num_shards

    @property
    def has_halves(self) -> bool:
        """Whether rungs are compiled as two micro-batches too."""
        return self._parallel.micro_batch_overlap != "off"

    def sharding(self, spec: P) -> NamedSharding:
        return self._mesh.sharding(spec)

    def abstract_packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """One packed vector a shard."""
        length = packed_len(bucket.share(self.num_shards), self._shape.pages_per_row)
        return jax.ShapeDtypeStruct((self.num_shards, length), jnp.int32, sharding=self.sharding(SHARDS))

    def _sharding(self, bucket: Bucket) -> LayerSharding:
        mesh, parallel = self._mesh, self._parallel
        tensor_axis = TENSOR_AXIS if mesh.num_tensor > 1 else None
        if mesh.num_shards == 1:
            return LayerSharding(None, tensor_axis)
        slots = slots_per_device(parallel, mesh.arch)
        tokens = bucket.tokens // mesh.num_shards // bucket.num_halves
        room = choose_capacity(tokens, mesh.arch.top_k, mesh.num_shards, slots, parallel.capacity_factor)
        dtype = DISPATCH_DTYPES[parallel.dispatch_dtype]
        exchange = Exchange(bucket.exchange, mesh.num_shards, EXPERT_AXIS, room, dtype)
        return LayerSharding(exchange, tensor_axis, bucket.num_halves)

    def _wrap(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *read: Any
    ) -> Callable[..., Any]:
        """read: how the last results are cut, which the host reads; on several hosts each device gets them whole."""

        def gathered(*args: Any) -> Any:
            results = function(*args)
            state, outputs = results[: len(out_specs)], results[len(out_specs) :]
            return *state, *jax.tree.map(_whole, read, outputs, is_leaf=_is_spec)

        if read and self._mesh.num_hosts > 1:
            run, read_specs = gathered, (EVERYWHERE,) * len(read)
        else:
            run, read_specs = function, read
        return jax.shard_map(
            run,
            mesh=self._mesh.mesh,
            in_specs=in_specs,
            out_specs=(*out_specs, *read_specs) if read else out_specs,
            check_vma=False,
        )


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _whole(spec: P, part: Any) -> Any:
    """An output, or a tree of such, whose parts are cut by `spec`."""
    axis = next((i for i, name in enumerate(spec) if name == EXPERT_AXIS), None)
    return part if axis is None else lax.all_gather(part, EXPERT_AXIS, axis=axis, tiled=True)
