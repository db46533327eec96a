"""DeviceState: the arrays that live on the device."""

from dataclasses import dataclass

import jax

from runtime.cache.kv_pool import KVPool
from runtime.ladder.step import RowState
from runtime.model.params import Params
from runtime.model.sampling import SamplingState


@dataclass(slots=True)
class DeviceState:
    """Every field is replaced by the launch that donates it."""

    params: Params
    pool: KVPool
    rows: RowState
    sampling: SamplingState
    hidden: jax.Array
