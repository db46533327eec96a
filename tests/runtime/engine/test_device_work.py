"""DeviceWork: what a command may not cost."""

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from runtime.engine.device_commands import LeanRouter
from runtime.engine.device_work import DeviceWork
from runtime.experts.weights import MoEParams
from runtime.model.architecture import from_hf_config
from runtime.model.params import init_params, with_router_bias
from tests.engine_driver import TINY


class OnDevice:
    """An array that counts how often the host reads it."""

    num_reads = 0

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        OnDevice.num_reads += 1
        return self.values


def test_the_models_own_bias_is_read_from_the_device_once() -> None:
    """Reading waits for the launches before it; and a bias is added to the model's own, not to the last one."""
    own, lean = np.full(8, 0.25, np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    params = init_params(from_hf_config(TINY), jnp.float32, 0)
    params = with_router_bias(params, 0, OnDevice(own))
    state, mesh = SimpleNamespace(params=params), SimpleNamespace(put=OnDevice)
    work = DeviceWork(cast(Any, None), cast(Any, state), cast(Any, mesh))
    for bias in (lean, 2 * lean, 0 * lean):
        work.run(LeanRouter(0, bias))
        ffn = work.state.params.layers[0].ffn
        assert isinstance(ffn, MoEParams)
        np.testing.assert_array_equal(ffn.router_bias.values, own + bias)
    assert OnDevice.num_reads == 1
