"""What an engine allocates is what its steps were compiled for: shape, type and place of every array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.config import ParallelConfig
from runtime.engine.device_arrays import DeviceArrays, start_placement, weight_specs
from runtime.experts.copies import copies_table
from runtime.experts.weights import MoEParams
from runtime.ladder.step import StepShape
from runtime.mesh import make_device_mesh
from runtime.model.architecture import from_hf_config
from runtime.model.spec import map_specs
from tests.engine_driver import TINY

ARCH = from_hf_config(TINY)
SHAPE = StepShape(num_slots=4, page_size=4, pages_per_row=8, max_prefill_tokens=16)


def arrays_of(**parallel: int) -> DeviceArrays:
    config = ParallelConfig(**parallel)
    return DeviceArrays(
        ARCH, SHAPE, 20, jnp.float32, make_device_mesh(config, ARCH), start_placement(config, ARCH)
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"expert_parallel_size": 4, "redundant_experts": 4},
        {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    ids=["one", "4", "2x2"],
)
def test_the_state_is_what_was_compiled_for(parallel):
    arrays = arrays_of(**parallel)
    specs = weight_specs(ARCH, jnp.float32, arrays.placement)

    def weight(spec):
        # A checkpoint knows experts, not slots.
        shape = (ARCH.num_experts, *spec.shape[1:]) if spec.axes[:1] == ("expert",) else spec.shape
        return arrays.place(spec, np.zeros(shape, spec.dtype))

    made, abstract = arrays.make_state(map_specs(weight, specs)), arrays.abstract_state()
    for name in ("params", "pool", "rows", "sampling", "hidden"):
        real, wanted = (jax.tree.leaves(getattr(tree, name)) for tree in (made, abstract))
        assert [(a.shape, a.dtype) for a in real] == [(a.shape, a.dtype) for a in wanted], name
        if parallel:
            for a, b in zip(real, wanted, strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name


def test_experts_start_in_the_slots_that_the_tables_name():
    arrays = arrays_of(expert_parallel_size=4, redundant_experts=4)
    placement = arrays.placement
    specs = weight_specs(ARCH, jnp.float32, placement)

    def weight(spec):
        if spec.axes[:1] != ("expert",):
            return arrays.place(spec, np.zeros(spec.shape, spec.dtype))
        host = np.broadcast_to(
            np.arange(ARCH.num_experts).reshape(-1, *[1] * (len(spec.shape) - 1)),
            (ARCH.num_experts, *spec.shape[1:]),
        )
        return arrays.place(spec, host.astype(spec.dtype))

    params = arrays.make_state(map_specs(weight, specs)).params
    for layer, table in enumerate(copies_table(placement)):
        ffn = params.layers[layer].ffn
        assert isinstance(ffn, MoEParams)
        held = np.asarray(ffn.w_down)[:, 0, 0]
        np.testing.assert_array_equal(np.asarray(ffn.copies), table)
        np.testing.assert_array_equal(held, placement.slot_experts[layer])
        named = np.where(table >= 0, held[table], np.arange(ARCH.num_experts)[:, None])
        assert (named == np.arange(ARCH.num_experts)[:, None]).all()


def test_one_device_has_no_placement():
    assert start_placement(ParallelConfig(), ARCH) is None
    assert start_placement(ParallelConfig(expert_parallel_size=4), ARCH).num_slots == ARCH.num_experts
