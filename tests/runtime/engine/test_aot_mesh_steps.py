"""The steps on eight GPUs that are compiled ahead of time: found by the check, and limits that are those of one GPU."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.aot_cases import all_steps
from runtime.engine.aot_mesh_steps import AOT_STEPS


def test_the_check_finds_them():
    assert {step.name for step in AOT_STEPS} <= {step.name for step in all_steps()}


@pytest.mark.parametrize("step", AOT_STEPS, ids=lambda step: step.name)
def test_the_limit_is_below_what_a_product_with_every_expert_would_write_on_one_gpu(step):
    """Arguments of one GPU are an eighth of what is cut over the mesh; a limit for all eight would find nothing."""
    mesh = Mesh(np.array(jax.devices()[: step.devices]), ("gpu",))
    _, (params, *_, packed) = step.build(mesh)
    num_experts, hidden = params.layers[0].ffn.router.shape
    tokens = int(step.name.split("-")[-1].split("/")[0])
    assert packed.shape[0] == step.devices
    assert packed.shape[1] >= tokens // step.devices  # a token id or a row each, and what else rows need
    assert step.dense_elements == tokens // step.devices * num_experts * hidden
