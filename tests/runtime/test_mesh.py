"""Which part of each weight lies where, and settings that do not fit, named."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from runtime.config import ParallelConfig
from runtime.errors import ModelLoadError
from runtime.mesh import make_device_mesh, slots_per_device
from runtime.model.architecture import QkNorm, from_hf_config
from runtime.model.spec import ArraySpec
from tests.engine_driver import TINY

ARCH = from_hf_config(TINY)  # 4 heads of 8, 2 of them for keys and values; 8 experts


def parts_of(array) -> list[list[int]]:
    by_device = sorted(array.addressable_shards, key=lambda s: s.device.id)
    return [np.asarray(s.data)[..., 0].ravel().tolist() for s in by_device]


def test_one_device_needs_no_mesh() -> None:
    assert make_device_mesh(ParallelConfig(), ARCH) is None


def test_stacked_blocks_are_cut_block_by_block() -> None:
    mesh = make_device_mesh(ParallelConfig(tensor_parallel_size=2), ARCH)
    assert mesh is not None
    assert (mesh.num_shards, mesh.num_tensor, mesh.local_arch.num_heads) == (1, 2, 2)
    rows = np.repeat(np.arange(64, dtype=np.float32)[:, None], 3, axis=1)  # 32 of q, 16 of k, 16 of v
    qkv = mesh.place(None, ArraySpec((64, 3), jnp.float32, ("qkv", "embed")), rows)
    first = [*range(16), *range(32, 40), *range(48, 56)]
    assert parts_of(qkv) == [first, [r for r in range(64) if r not in first]]
    gated = mesh.place(None, ArraySpec((8, 3), jnp.float32, ("gate_up", "embed")), rows[:8])
    assert parts_of(gated) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_experts_go_to_their_slots() -> None:
    mesh = make_device_mesh(ParallelConfig(expert_parallel_size=2, redundant_experts=2), ARCH)
    assert mesh is not None
    held = np.array([0, 1, 2, 3, 7, 4, 5, 6, 7, 0])
    spec = ArraySpec((10, 1, 1), jnp.float32, ("expert", "gate_up", "embed"))
    placed = mesh.place(held, spec, np.arange(8, dtype=np.float32).reshape(8, 1, 1))
    assert parts_of(placed) == [[0, 1, 2, 3, 7], [4, 5, 6, 7, 0]]
    assert mesh.part_nbytes([spec, ArraySpec((6,), jnp.float32, ("embed",))]) == 20 + 24


def test_slots_are_rounded_up_to_whole_devices() -> None:
    parallel = ParallelConfig(expert_parallel_size=3, redundant_experts=2)
    assert slots_per_device(parallel, ARCH) == 4


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"tensor_parallel_size": 3}, {}, "must divide key-value heads, 2"),
        ({"tensor_parallel_size": 2}, {"qk_norm": QkNorm.FULL}, "normalises queries"),
        ({"expert_parallel_size": 2}, {"num_experts": 0}, "no experts"),
    ],
)
def test_a_model_that_cannot_be_cut_is_named(sizes, changes, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        make_device_mesh(ParallelConfig(**sizes), replace(ARCH, **changes))
