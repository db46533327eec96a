"""A store is loaded once, slots hold its first experts, and pages get the memory that sleeping experts leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.config import parse_config
from runtime.engine import build
from runtime.engine.device_arrays import DeviceArrays, residency_shape, resident_slots, weight_specs
from runtime.experts.weights import MoEParams
from runtime.ladder.step import StepShape
from runtime.model.architecture import from_hf_config
from runtime.model.params import init_params
from runtime.model.spec import device_nbytes, tree_nbytes
from tests.engine_driver import TINY

ARCH = from_hf_config(TINY)
SHAPE = StepShape(num_slots=4, page_size=4, pages_per_row=8, max_prefill_tokens=16)


def settings(**experts: int):
    return parse_config({"experts": experts}).experts


def test_the_state_is_what_was_compiled_for_and_holds_the_models_weights() -> None:
    resident = resident_slots(settings(resident_experts=3, prefetch_experts=1), ARCH)
    arrays = DeviceArrays(ARCH, SHAPE, 20, jnp.float32, resident=resident)
    made = arrays.make_state(init_params(ARCH, jnp.float32, 0, arrays.place)).params
    whole = init_params(ARCH, jnp.float32, 0)
    wanted = arrays.abstract_state().params
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for real, shape in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert (real.shape, real.dtype) == (shape.shape, shape.dtype)
        if shape.sharding is not None:
            assert real.sharding.memory_kind == shape.sharding.memory_kind == "pinned_host"
    for layer, other in zip(made.layers, whole.layers, strict=True):
        ffn = layer.ffn
        assert isinstance(ffn, MoEParams)
        np.testing.assert_array_equal(ffn.store.w_down, other.ffn.w_down)
        np.testing.assert_array_equal(ffn.w_down, np.asarray(other.ffn.w_down)[:3])
        assert ffn.store.slot_of_expert.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_bytes_are_those_of_slots_and_store() -> None:
    resident = resident_slots(settings(resident_experts=3), ARCH)
    specs, all_specs = (weight_specs(ARCH, jnp.float32, None, r) for r in (resident, None))
    shape = residency_shape(ARCH, specs, resident)
    assert shape.expert_bytes == 3 * 32 * 16 * 4
    asleep = 2 * 5 * shape.expert_bytes
    tables = 2 * 8 * 4
    assert device_nbytes(specs) == tree_nbytes(all_specs) - asleep + tables
    assert tree_nbytes(specs) - device_nbytes(specs) == 2 * 8 * shape.expert_bytes


@pytest.mark.parametrize(("backend", "frees"), [("gpu", True), ("cpu", False)])
def test_pages_get_what_sleeps_only_where_the_host_is_another_memory(monkeypatch, backend, frees) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(build, "device_memory_bytes", lambda: 400_000)
    config, resident = parse_config({}), resident_slots(settings(resident_experts=3), ARCH)
    shape = StepShape(
        num_slots=1000, page_size=4, pages_per_row=8, max_prefill_tokens=16
    )  # rows for any number
    counts = [
        build.count_pages(config.kv_cache, ARCH, shape, jnp.float32, weight_specs(ARCH, jnp.float32, None, r))
        for r in (resident, None)
    ]
    assert (counts[0] > counts[1]) == frees
    assert (counts[0] < counts[1]) == (not frees)


def test_zero_is_all_resident() -> None:
    assert resident_slots(settings(), ARCH) is None
