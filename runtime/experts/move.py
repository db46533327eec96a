"""move_expert: the weights of one expert from one physical slot to another, whatever devices they lie on.

Runs inside `shard_map` on donated arrays, so that nothing but the two slots is written. Bits are carried as integers:
the sum over devices, of which all but one add zero, is exact for every value.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def move_expert(
    w_gate_up: Float[Array, "S F2 D"],
    w_down: Float[Array, "S D F"],
    from_slot: Int[Array, ""],
    to_slot: Int[Array, ""],
    is_exchange: Bool[Array, ""],
    *,
    axis: str,
) -> tuple[Float[Array, "S F2 D"], Float[Array, "S D F"]]:
    """Slots are numbered over all devices. With `is_exchange` the two slots swap what they hold."""
    arguments = (from_slot, to_slot, is_exchange, axis)
    return _move(w_gate_up, *arguments), _move(w_down, *arguments)


def _move(w: Array, from_slot: Array, to_slot: Array, is_exchange: Array, axis: str) -> Array:
    slots, me = w.shape[0], lax.axis_index(axis)

    def local(slot: Array) -> tuple[Array, Array]:
        place = slot - me * slots
        return jnp.clip(place, 0, slots - 1), (place >= 0) & (place < slots)

    def read(slot: Array) -> Array:
        place, is_here = local(slot)
        bits = lax.bitcast_convert_type(w[place], _UNSIGNED[w.dtype.itemsize])
        return lax.bitcast_convert_type(lax.psum(jnp.where(is_here, bits, 0), axis), w.dtype)

    def write(w: Array, slot: Array, value: Array) -> Array:
        place, is_here = local(slot)
        return lax.dynamic_update_index_in_dim(w, jnp.where(is_here, value, w[place]), place, 0)

    moved, displaced = read(from_slot), read(to_slot)
    w = write(w, to_slot, moved)
    return write(w, from_slot, jnp.where(is_exchange, displaced, moved))
