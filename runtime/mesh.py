"""The devices of one engine as a mesh, and which part of each array lies where.

Two axes. `expert`: each device owns rows, KV pages and expert slots of its own; everything but the experts' weights is
data-parallel along it. `tensor`: devices of one expert shard share each product, by heads and by the experts' width.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.config import ParallelConfig
from runtime.errors import ModelLoadError
from runtime.model.architecture import Architecture, QkNorm
from runtime.model.spec import ArraySpec, is_spec

EXPERT_AXIS = "expert"
TENSOR_AXIS = "tensor"

# Which mesh axis cuts which axis of a weight; what is not here lies on every device.
AXES = {
    "expert": EXPERT_AXIS,
    "qkv": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "gate_up": TENSOR_AXIS,
    "ffn": TENSOR_AXIS,
}


@dataclass(frozen=True)
class DeviceMesh:
    """A mesh with the model's widths settled on it."""

    mesh: Mesh
    arch: Architecture  # the whole model's

    @property
    def num_shards(self) -> int:
        """Devices along the expert axis: shards of rows and pages."""
        return self.mesh.shape[EXPERT_AXIS]

    @property
    def num_tensor(self) -> int:
        return self.mesh.shape[TENSOR_AXIS]

    @property
    def num_hosts(self) -> int:
        """Processes that have devices of it."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def num_local(self) -> int:
        """Devices of this process."""
        return len(self.mesh.local_devices)

    @property
    def local_arch(self) -> Architecture:
        """What one device computes: its share of the heads."""
        n = self.num_tensor
        return replace(
            self.arch, num_heads=self.arch.num_heads // n, num_kv_heads=self.arch.num_kv_heads // n
        )

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def spec_of(self, array: ArraySpec) -> PartitionSpec:
        """How a weight is cut."""
        return PartitionSpec(*(AXES.get(axis) for axis in array.axes))

    def part_nbytes(self, tree: Any) -> int:
        """Bytes of one device's part of a tree of ArraySpec."""
        total = 0
        for array in jax.tree.leaves(tree, is_leaf=is_spec):
            cut = [self.mesh.shape[axis] for axis in self.spec_of(array) if axis is not None]
            total += array.nbytes // math.prod(cut)
        return total

    def place(self, slot_experts: np.ndarray | None, array: ArraySpec, host: np.ndarray) -> jax.Array:
        """A weight from its whole copy on the host, each device getting its part only.

        slot_experts: the expert in each physical slot, [P]; an array by expert becomes one by slot.
        """
        host, sharding = self._by_tensor_shard(array, host), self.sharding(self.spec_of(array))
        if array.axes[:1] != ("expert",) or slot_experts is None:
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
        held, shape = np.asarray(slot_experts), (len(slot_experts), *host.shape[1:])

        def part(index: Any) -> np.ndarray:
            return host[held[index[0]]][(slice(None), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, part)

    def put(self, host: np.ndarray) -> jax.Array:
        """The same array on every device."""
        return self.spread(PartitionSpec(), host)

    def spread(self, spec: PartitionSpec, whole: Any) -> jax.Array:
        """An array of which every host has a whole copy, each device getting its part."""
        host = np.asarray(whole)
        return jax.make_array_from_callback(host.shape, self.sharding(spec), lambda index: host[index])

    def _by_tensor_shard(self, array: ArraySpec, host: np.ndarray) -> np.ndarray:
        """Stacked blocks (q, k, v; gate, up) reordered, so that each tensor shard's part holds its share of each.

        gate and up of 4 rows each on 2 devices: g0 g1 g2 g3 u0 u1 u2 u3 becomes g0 g1 u0 u1 | g2 g3 u2 u3.
        """
        n = self.num_tensor
        axis = next((i for i, name in enumerate(array.axes) if name in ("qkv", "gate_up")), None)
        if n == 1 or axis is None:
            return host
        if array.axes[axis] == "gate_up":
            sizes = [host.shape[axis] // 2] * 2
        else:
            sizes = [self.arch.q_size, self.arch.kv_size, self.arch.kv_size]
        starts = np.cumsum([0, *sizes[:-1]])
        order = [
            np.arange(start + shard * length // n, start + (shard + 1) * length // n)
            for shard in range(n)
            for start, length in zip(starts, sizes, strict=True)
        ]
        return np.take(host, np.concatenate(order), axis=axis)


def make_device_mesh(parallel: ParallelConfig, arch: Architecture) -> DeviceMesh | None:
    """The mesh that the configuration asks for; None for one device, which needs none.

    Raises ModelLoadError, with field and value, when devices are missing or the model cannot be cut that way.
    """
    check_sizes(parallel, arch)
    devices = mesh_devices(parallel)
    if len(devices) == 1:
        return None
    grid = np.array(devices).reshape(parallel.expert_parallel_size, parallel.tensor_parallel_size)
    return DeviceMesh(Mesh(grid, (EXPERT_AXIS, TENSOR_AXIS)), arch)


def mesh_devices(parallel: ParallelConfig) -> list[Any]:
    """The devices that the configuration asks for, host after host.

    Raises ModelLoadError, with field and value, where they are missing or cannot exchange tokens in the way asked for.
    """
    devices = _devices_of_hosts(parallel)
    if len(devices) > 1 and parallel.exchange == "ragged" and devices[0].platform == "cpu":
        raise ModelLoadError(
            "parallel.exchange is ragged, which CPUs do not have; auto, gather and all_to_all are allowed",
            param="parallel.exchange",
        )
    return devices


def _devices_of_hosts(parallel: ParallelConfig) -> list[Any]:
    """An equal number of each host, host after host. Raises ModelLoadError where one has too few."""
    shards, tensor, hosts = parallel.expert_parallel_size, parallel.tensor_parallel_size, parallel.hosts
    by_host: dict[int, list[Any]] = {host: [] for host in range(hosts)}
    for device in jax.devices():
        by_host.setdefault(device.process_index, []).append(device)
    wanted = shards * tensor // hosts
    for host, devices in by_host.items():
        if len(devices) < wanted:
            whose = "" if hosts == 1 else f" on each of {hosts} hosts"
            where = "are present" if hosts == 1 else f"are present on host {host}"
            raise ModelLoadError(
                f"parallel.expert_parallel_size {shards} x parallel.tensor_parallel_size {tensor} needs "
                f"{wanted} devices{whose}, {len(devices)} {where}",
                param="parallel.expert_parallel_size",
            )
    return [device for host in range(hosts) for device in by_host[host][:wanted]]


def slots_per_device(parallel: ParallelConfig, arch: Architecture) -> int:
    """Expert slots of one device and layer: experts and redundant ones, rounded up to whole devices."""
    return -(-(arch.num_experts + parallel.redundant_experts) // parallel.expert_parallel_size)


def check_sizes(parallel: ParallelConfig, arch: Architecture) -> None:
    """Raises ModelLoadError, with field and value, where the model cannot be cut that way, whatever the devices."""
    shards, tensor = parallel.expert_parallel_size, parallel.tensor_parallel_size
    if shards > 1 and arch.num_experts == 0:
        raise _unfit("parallel.expert_parallel_size", shards, "the model has no experts; 1 is allowed")
    if shards > max(1, arch.num_experts):
        raise _unfit(
            "parallel.expert_parallel_size", shards, f"at most {arch.num_experts}, the number of experts"
        )
    if shards == 1 and parallel.redundant_experts:
        raise _unfit(
            "parallel.redundant_experts",
            parallel.redundant_experts,
            "0 on one device: copies lie on distinct ones",
        )
    if shards > 1 and slots_per_device(parallel, arch) > arch.num_experts:
        most = arch.num_experts * (shards - 1)
        raise _unfit(
            "parallel.redundant_experts", parallel.redundant_experts, f"at most {most} on {shards} devices"
        )
    if tensor == 1:
        return
    name = "parallel.tensor_parallel_size"
    widths = {
        "key-value heads": arch.num_kv_heads,
        "query heads": arch.num_heads,
        "the experts' width": arch.expert_ffn,
        "the dense layers' width": arch.dense_ffn,
    }
    for what, width in widths.items():
        if width % tensor:
            raise _unfit(name, tensor, f"it must divide {what}, {width}")
    if arch.qk_norm is QkNorm.FULL:
        raise _unfit(name, tensor, "1 only: this model normalises queries over all heads at once")


def _unfit(field: str, value: int, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"{field} is {value}; {allowed}", param=field)
