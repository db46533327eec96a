"""move_expert: the weights of one expert from one physical slot to another, whatever devices they lie on.

Runs inside `shard_map` on donated arrays, so that nothing but the two slots is written. Bits are carried as integers:
the sum over devices, of which all but one add zero, is exact for every value.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def move_expert(
    w_gate_up: Float[Array, "S F2 D"], w_down: Float[Array, "S D F"], order: Int[Array, "3"], *, axis: str
) -> tuple[Float[Array, "S F2 D"], Float[Array, "S D F"]]:
    """order: from_slot, to_slot, is_exchange; slots are numbered over all devices. With is_exchange 1 the two slots swap
    what they hold.

    Both slots of both weights travel in one sum: a sum is a meeting of all devices, which costs more than its bytes.
    """
    weights, slots, me = (w_gate_up, w_down), w_gate_up.shape[0], lax.axis_index(axis)
    place = order[:2] - me * slots
    is_here = (place >= 0) & (place < slots)  # [2]: of from_slot, of to_slot
    place = jnp.clip(place, 0, slots - 1)
    bits = [lax.bitcast_convert_type(w[place], _UNSIGNED[w.dtype.itemsize]) for w in weights]  # [2, ...] each
    flat = jnp.concatenate([b.reshape(2, -1) for b in bits], axis=1)
    flat = lax.psum(jnp.where(is_here[:, None], flat, 0), axis)
    source = jnp.stack([jnp.where(order[2] == 1, 1, 0), 0])  # what from_slot and to_slot get

    def write(w: Array, part: Array) -> Array:
        held = lax.bitcast_convert_type(part.reshape(2, *w.shape[1:]), w.dtype)[source]
        for nth in (1, 0):  # to_slot first: a slot moved over itself keeps what it had
            value = jnp.where(is_here[nth], held[nth], w[place[nth]])
            w = lax.dynamic_update_index_in_dim(w, value, place[nth], 0)
        return w

    cut = bits[0][0].size
    return write(w_gate_up, flat[:, :cut]), write(w_down, flat[:, cut:])
