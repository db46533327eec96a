"""move_experts: weights of experts from physical slots to others of a layer, whatever devices they lie on.

Runs inside `shard_map` on donated arrays, so that nothing but the slots is written. Bits are carried as integers: the sum
over devices, of which all but one add zero, is exact for every value.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from runtime.experts.move_order import SLOTS_A_TRANSFER

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def move_experts(
    w_gate_up: Float[Array, "S F2 D"],
    w_down: Float[Array, "S D F"],
    copies: Int[Array, "E G"],
    order: Int[Array, " M"],
    *,
    axis: str,
) -> tuple[Float[Array, "S F2 D"], Float[Array, "S D F"], Int[Array, "E G"]]:
    """The weights and the layer's table of copies after an order, which `move_order.order_of` makes: both in one launch, so
    that no table names a slot whose weights are not there.

    All slots are read before one is written.
    Everything travels in one sum: a sum is a meeting of all devices, which costs more than its bytes.
    """
    weights, slots = (w_gate_up, w_down), w_gate_up.shape[0]
    order, table = jnp.split(order, [order.size - copies.size])
    order = order.reshape(SLOTS_A_TRANSFER, 2)
    places = order - lax.axis_index(axis) * slots
    is_here = (order >= 0) & (places >= 0) & (places < slots)
    places = jnp.clip(places, 0, slots - 1)
    bits = [lax.bitcast_convert_type(w[places[:, 1]], _UNSIGNED[w.dtype.itemsize]) for w in weights]
    flat = jnp.concatenate([b.reshape(SLOTS_A_TRANSFER, -1) for b in bits], axis=1)
    flat = lax.psum(jnp.where(is_here[:, 1:], flat, 0), axis)

    def write(w: Array, part: Array) -> Array:
        values = lax.bitcast_convert_type(part.reshape(-1, *w.shape[1:]), w.dtype)
        for nth in range(SLOTS_A_TRANSFER):
            place = places[nth, 0]
            value = jnp.where(is_here[nth, 0], values[nth], w[place])
            w = lax.dynamic_update_index_in_dim(w, value, place, 0)
        return w

    cut = bits[0][0].size
    return write(w_gate_up, flat[:, :cut]), write(w_down, flat[:, cut:]), table.reshape(copies.shape)
