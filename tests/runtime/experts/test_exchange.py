"""Every exchange against the layer on one device: no pair is lost, whatever the room, the copies or the skew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.router.spec import RouterSpec
from runtime.experts.copies import copies_table
from runtime.experts.exchange_kind import ExchangeKind
from runtime.experts.exchange_spec import Exchange, choose_capacity
from runtime.experts.layer import ExpertLoad, moe_layer
from runtime.experts.placement import ExpertPlacement
from runtime.experts.weights import MoEParams
from runtime.experts.wire import FP8

NUM_EXPERTS, TOP_K, D, F, TOKENS = 6, 3, 16, 8, 24
OPTIONS = {"routing": RouterSpec(TOP_K, renormalise=True), "activation": "silu"}


def layer_inputs(skew: float) -> tuple[MoEParams, jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    router, gate_up, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((NUM_EXPERTS, D), (NUM_EXPERTS, 2 * F, D), (NUM_EXPERTS, D, F))
    )
    x = rng.standard_normal((TOKENS, D)).astype(np.float32) + skew * router[0]  # towards expert 0
    return MoEParams(router, gate_up, down), jnp.asarray(x), jnp.asarray(rng.random(TOKENS) < 0.8)


def make_layer(exchange: Exchange, placement: ExpertPlacement):
    slots = placement.slot_experts[0]
    weights = MoEParams(P(), P("expert"), P("expert"), copies=P())
    table = copies_table(placement)[0]
    mesh = Mesh(np.array(jax.devices()[: placement.num_devices]), ("expert",))

    def of_device(params: MoEParams, x: jax.Array, is_real: jax.Array, weight: jax.Array):
        return moe_layer(params, x, is_real, exchange=exchange, balance_weight=weight, **OPTIONS)

    sharded = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(weights, P("expert"), P("expert"), P()),
        out_specs=(P("expert"), ExpertLoad(P("expert"), P("expert"))),
        check_vma=False,
    )
    layer = jax.jit(sharded)

    def run(params: MoEParams, x: jax.Array, is_real: jax.Array, weight: float = 0.5):
        gate_up, down = params.w_gate_up[slots], params.w_down[slots]
        by_slot = MoEParams(params.router, gate_up, down, copies=table)
        return layer(by_slot, x, is_real, jnp.float32(weight))

    return run


@pytest.mark.parametrize(
    ("kind", "capacity", "devices", "slots"),
    [
        (ExchangeKind.GATHER, 0, 2, 3),
        (ExchangeKind.GATHER, 0, 4, 3),
        (ExchangeKind.ALL_TO_ALL, 1, 2, 5),
        (ExchangeKind.ALL_TO_ALL, 1, 8, 1),
        (ExchangeKind.ALL_TO_ALL, 24, 4, 3),
    ],
    ids=["gather", "gather-copies", "many-rounds-copies", "many-rounds", "one-round-copies"],
)
def test_is_the_layer_of_one_device(kind, capacity, devices, slots) -> None:
    placement = ExpertPlacement.uniform(1, NUM_EXPERTS, devices, slots)
    layer = make_layer(Exchange(kind, devices, "expert", capacity), placement)
    for skew in (0.0, 4.0):
        params, x, is_real = layer_inputs(skew)
        expected, load = moe_layer(params, x, is_real, **OPTIONS)
        for weight in (0.0, 0.5):
            out, found = layer(params, x, is_real, weight)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
            assert found.tokens.reshape(devices, -1).sum(axis=0).tolist() == load.tokens.tolist()
            assert found.rows.sum() == TOP_K * int(is_real.sum())


def test_copies_share_the_rows_of_a_hot_expert() -> None:
    """All 24 tokens want expert 0, and both devices hold a copy: each computes half of its rows."""
    params, x, _ = layer_inputs(100.0)
    is_real = jnp.ones(TOKENS, bool)
    placement = ExpertPlacement(np.array([[0, 1, 2, 3, 0, 4, 5, 1]]), 2, NUM_EXPERTS)
    ids = jax.lax.top_k(x @ params.router.T, TOP_K)[1]
    assert (ids == 0).any(axis=1).all()
    layer = make_layer(Exchange(ExchangeKind.GATHER, 2, "expert"), placement)
    _, load = layer(params, x, is_real, 0)
    only = [int(np.isin(ids, experts).sum()) for experts in ((2, 3), (4, 5))]
    both = int(np.isin(ids, (0, 1)).sum())
    assert int(load.rows.sum()) == sum(only) + both
    assert abs(int(load.rows[0]) - only[0] - both / 2) <= 2
    _, load = layer(params, x, is_real, 0.5)
    assert only[0] != only[1]
    assert abs(int(load.rows[0]) - int(load.rows[1])) <= 1


@pytest.mark.parametrize(
    ("dtype", "error"), [(jnp.dtype(jnp.bfloat16), 0.02), (FP8, 0.1)], ids=["bf16", "fp8"]
)
@pytest.mark.parametrize("kind", [ExchangeKind.GATHER, ExchangeKind.ALL_TO_ALL])
def test_narrow_dispatch_is_near(dtype, error, kind) -> None:
    params, x, is_real = layer_inputs(0.0)
    expected, _ = moe_layer(params, x, is_real, **OPTIONS)
    placement = ExpertPlacement.uniform(1, NUM_EXPERTS, 2, 3)
    out, _ = make_layer(Exchange(kind, 2, "expert", 16, dtype), placement)(params, x, is_real)
    distance = jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)
    assert 0 < distance < error


def test_capacity_is_bounded_by_what_can_occur() -> None:
    assert choose_capacity(64, 8, 8, 32, 1.5) == 96
    assert choose_capacity(64, 8, 8, 32, 100.0) == 512  # no device gets more than every pair
    assert choose_capacity(64, 8, 8, 2, 100.0) == 128  # a token has at most one pair a slot
    assert choose_capacity(1, 2, 8, 4, 1.5) == 2
