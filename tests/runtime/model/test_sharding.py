"""What devices of one step must agree on."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from runtime.experts.exchange import Exchange
from runtime.experts.exchange_kind import ExchangeKind
from runtime.model.sharding import ALONE, LayerSharding

BOTH = PartitionSpec(("e", "t"))


@pytest.mark.parametrize("differing", range(4))
def test_one_device_that_goes_on_keeps_all_going(differing: int) -> None:
    """Also one that shares its rows with another: a loop that ends on one of them would leave the other in its sums."""
    sharding = LayerSharding(Exchange(ExchangeKind.GATHER, 2, "e"), "t")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("e", "t"))
    ask = jax.shard_map(sharding.any_device, mesh=mesh, in_specs=BOTH, out_specs=BOTH, check_vma=False)
    assert np.asarray(ask(np.arange(4) == differing)).tolist() == [True] * 4
    assert not np.asarray(ask(np.zeros(4, bool))).any()


def test_one_device_asks_nobody() -> None:
    flag = np.array(True)
    assert ALONE.any_device(flag) is flag
