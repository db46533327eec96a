"""DeviceArrays: what lies on the devices of one engine, as shapes before it exists and then as arrays.

With several devices each shard's rows, pages and scratch stand one after another along axis 0, each on its own devices.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from runtime.cache.kv_pool import KVPool, abstract_kv_pool, make_kv_pool
from runtime.config import ExpertsConfig, ParallelConfig
from runtime.engine.device_state import DeviceState
from runtime.engine.residency_shape import ResidencyShape
from runtime.errors import ModelLoadError
from runtime.experts.copies import copies_table
from runtime.experts.placement import ExpertPlacement
from runtime.experts.weights import ExpertStore, MoEParams
from runtime.ladder.compiler import AbstractState
from runtime.ladder.mesh_steps import POOL, SHARDS
from runtime.ladder.step import SCORE_CHUNK, StepShape, abstract_row_state
from runtime.mesh import DeviceMesh, slots_per_device
from runtime.model.architecture import Architecture
from runtime.model.params import (
    ExpertSlots,
    Params,
    ResidentSlots,
    abstract_params,
    with_copies,
    with_router_bias,
)
from runtime.model.sampling import SamplingState, abstract_sampling_state, make_sampling_state
from runtime.model.spec import ArraySpec, host_memory, map_specs, on_one_device, to_shape_structs


def start_placement(parallel: ParallelConfig, arch: Architecture) -> ExpertPlacement | None:
    """Where experts lie when an engine starts; None where one device holds them all."""
    if parallel.expert_parallel_size == 1:
        return None
    per_device = slots_per_device(parallel, arch)
    return ExpertPlacement.uniform(
        arch.num_layers, arch.num_experts, parallel.expert_parallel_size, per_device
    )


def resident_slots(experts: ExpertsConfig, arch: Architecture) -> ResidentSlots | None:
    """Slots and staged experts of a layer; None where all experts are resident. Raises ModelLoadError, with the field."""
    for name in ("resident_experts", "prefetch_experts"):
        if getattr(experts, name) > arch.num_experts:
            allowed = f"0 to {arch.num_experts}, the model's experts of a layer"
            raise ModelLoadError(
                f"experts.{name} is {getattr(experts, name)}; {allowed}", param=f"experts.{name}"
            )
    if experts.resident_experts == 0:
        return None
    if experts.resident_experts < arch.top_k:
        raise ModelLoadError(
            f"experts.resident_experts is {experts.resident_experts}; 0, or {arch.top_k} (what one token "
            f"takes of this model) to {arch.num_experts}",
            param="experts.resident_experts",
        )
    return ResidentSlots(experts.resident_experts, experts.prefetch_experts)


def residency_shape(arch: Architecture, specs: Params, resident: ResidentSlots) -> ResidencyShape:
    """What residency is about, by layer. specs: of all weights."""
    ffns = [layer.ffn for layer in specs.layers]
    store = next(ffn.store for ffn in ffns if isinstance(ffn, MoEParams))
    return ResidencyShape(
        tuple(isinstance(ffn, MoEParams) for ffn in ffns),
        arch.num_experts,
        resident.num_slots,
        (store.w_gate_up.nbytes + store.w_down.nbytes) // arch.num_experts,
    )


def weight_specs(
    arch: Architecture,
    dtype: DTypeLike,
    placement: ExpertPlacement | None,
    resident: ResidentSlots | None = None,
) -> Params:
    """Params of ArraySpec; with a placement, of its slots; with resident slots, of these and a store."""
    slots = placement and ExpertSlots(placement.num_slots, placement.num_devices)
    return abstract_params(arch, dtype, slots or resident)


class DeviceArrays:
    """Shapes and arrays of one engine. `shape` and `num_pages` are those of one shard; mesh None: one device."""

    def __init__(
        self,
        arch: Architecture,
        shape: StepShape,
        num_pages: int,
        dtype: DTypeLike,
        mesh: DeviceMesh | None = None,
        placement: ExpertPlacement | None = None,
        resident: ResidentSlots | None = None,
        balance_weight: float = 0.0,
    ) -> None:
        """balance_weight: expert_balance_weight to start with, of several devices."""
        self._arch, self._shape, self._num_pages, self._dtype = arch, shape, num_pages, dtype
        self._mesh, self.placement, self._resident = mesh, placement, resident
        self._balance_weight = balance_weight
        self._specs = weight_specs(arch, dtype, placement, resident)

    def abstract_state(self) -> AbstractState:
        """Shapes of everything that a step takes, with where each part lies."""
        shape, arch = self._shape, self._arch
        pool: KVPool = to_shape_structs(abstract_kv_pool(arch, self._num_pages, shape.page_size, self._dtype))
        hidden = jax.ShapeDtypeStruct((shape.max_prefill_tokens + SCORE_CHUNK, arch.hidden_size), self._dtype)
        sampling = abstract_sampling_state(shape.num_slots, arch.vocab_size)
        parts = (pool, abstract_row_state(shape), sampling, hidden)
        if self._mesh is None:
            return AbstractState(to_shape_structs(self._specs), *parts)
        cuts = (POOL, SHARDS, SHARDS, SHARDS)
        stacked = [
            jax.tree.map(partial(self._stack, cut), part) for cut, part in zip(cuts, parts, strict=True)
        ]
        return AbstractState(map_specs(self._weight, self._specs), *stacked)

    def cuts(self) -> Params:
        """How each weight is cut, as PartitionSpecs."""
        assert self._mesh is not None
        return map_specs(self._mesh.spec_of, self._specs)

    def place(self, spec: ArraySpec, host: np.ndarray) -> jax.Array:
        """A weight of the checkpoint to where it belongs. Of experts that may sleep: to the host's memory, all of them."""
        if self._resident is not None and spec.axes[0] == "expert":
            return jax.device_put(host, host_memory())
        if self._mesh is None:
            return on_one_device(spec, host)
        return self._mesh.place(self.placement and self.placement.slot_experts[0], spec, host)

    def make_state(self, params: Params) -> DeviceState:
        """Empty pages, rows and scratch beside the given weights."""
        abstract = self.abstract_state()
        if self._mesh is None:
            pool = make_kv_pool(self._arch, self._num_pages, self._shape.page_size, self._dtype)
            sampling = make_sampling_state(self._shape.num_slots, self._arch.vocab_size)
            rows, hidden = (jax.tree.map(_zeros, a) for a in (abstract.rows, abstract.hidden))
            if self._resident is not None:
                params = _with_store(params, self._resident)
            return DeviceState(params, pool, rows, sampling, hidden)
        pool, rows, hidden = (
            jax.tree.map(_zeros, a) for a in (abstract.pool, abstract.rows, abstract.hidden)
        )
        num_slots = self._mesh.num_shards * (self._shape.num_slots + 1)
        sampling: SamplingState = make_sampling_state(num_slots - 1, self._arch.vocab_size)
        sampling = jax.tree.map(partial(self._mesh.spread, SHARDS), sampling)
        if self.placement is not None:
            weight = self._mesh.put(np.array(self._balance_weight, np.float32))
            params = replace(params, balance_weight=weight)
            for layer, table in enumerate(copies_table(self.placement)):
                params = with_copies(params, layer, self._mesh.put(table))
                if not self._arch.has_router_bias:
                    zeros = self._mesh.put(np.zeros(self._arch.num_experts, np.float32))
                    params = with_router_bias(params, layer, zeros)
        return DeviceState(params, pool, rows, sampling, hidden)

    def _stack(self, cut: PartitionSpec, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert self._mesh is not None
        shape = (self._mesh.num_shards * one.shape[0], *one.shape[1:])
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=self._mesh.sharding(cut))

    def _weight(self, spec: ArraySpec) -> jax.ShapeDtypeStruct:
        assert self._mesh is not None
        return jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=self._mesh.sharding(self._mesh.spec_of(spec))
        )


def _with_store(params: Params, resident: ResidentSlots) -> Params:
    """All experts as they were placed become the store; slot s gets expert s, to begin with. Layer by layer."""
    layers = list(params.layers)
    for i, layer in enumerate(layers):
        if isinstance(ffn := layer.ffn, MoEParams):
            num_experts, num_slots = ffn.w_gate_up.shape[0], resident.num_slots
            table = np.arange(num_experts, dtype=np.int32)
            table[num_slots:] = -1
            store = ExpertStore(ffn.w_gate_up, ffn.w_down, jnp.asarray(table), resident.num_staged)
            # A copy: on a CPU an array made from a view of the store would lie in the store's memory.
            slots = [jnp.array(np.asarray(w)[:num_slots], copy=True) for w in (ffn.w_gate_up, ffn.w_down)]
            jax.block_until_ready(slots)  # no second layer's host copy beside a slow transfer
            layers[i] = replace(layer, ffn=replace(ffn, w_gate_up=slots[0], w_down=slots[1], store=store))
    return replace(params, layers=tuple(layers))


def _zeros(one: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(one.shape, one.dtype, device=one.sharding)
