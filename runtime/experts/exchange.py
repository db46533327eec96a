"""Tokens to the devices that hold their experts and back: three exchanges behind one signature.

Runs inside `shard_map`: every array here is one device's share. S expert slots a device, G devices, slot p of all
P = G * S lies on device p // S. A pair is one (token, choice), numbered token * k + choice. No exchange ever drops a
pair: where a buffer is full, the rest goes in a further round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from runtime.experts.dispatch import Dispatch, plan_pairs
from runtime.experts.exchange_kind import ExchangeKind
from runtime.experts.router import Routing

# (rows sorted by slot [M, D], rows of each slot [S]) -> results [M, D]; rows past the sum come back as zeros
Experts = Callable[[Array, Array], Array]

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_MAX = 448.0
MIN_CAPACITY = 8


@dataclass(frozen=True)
class Exchange:
    """What a rung fixes about the way of its tokens; static.

    capacity: rows from one device to another in one round of `all_to_all`.
    dispatch_dtype: type in which tokens travel to their experts; None: that of the weights. Results travel in the
        type of the weights.
    """

    kind: ExchangeKind
    num_devices: int
    axis: str
    capacity: int = 0
    dispatch_dtype: Any = None


def choose_capacity(num_tokens: int, top_k: int, num_devices: int, slots: int, factor: float) -> int:
    """Rows from one device to another in one round: `factor` times an even spread, never more than can occur.

    num_tokens: of one device. slots: expert slots of a device; a token's experts are distinct.
    """
    most = num_tokens * min(top_k, slots)
    even = -(-num_tokens * top_k // num_devices)
    wanted = -(-max(MIN_CAPACITY, int(even * factor)) // MIN_CAPACITY) * MIN_CAPACITY
    return min(most, wanted)


def exchange_tokens(
    exchange: Exchange,
    x: Float[Array, "T D"],
    routing: Routing,
    slots: Int[Array, "T k"],
    is_real: Bool[Array, " T"],
    experts: Experts,
    slots_per_device: int,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """(weighted sum of each token's experts in float32, rows that this device computed).

    x: in the type of the weights. slots: the physical slot of each pair, of all devices.
    """
    num_slots = exchange.num_devices * slots_per_device
    slots = jnp.where(is_real[:, None], slots, num_slots)  # padding goes nowhere
    run = {
        ExchangeKind.GATHER: _gather,
        ExchangeKind.ALL_TO_ALL: _all_to_all,
        ExchangeKind.RAGGED: _ragged,
    }[exchange.kind]
    return run(exchange, x, routing, slots, experts, slots_per_device)


def _gather(
    exchange: Exchange, x: Array, routing: Routing, slots: Array, experts: Experts, slots_per_device: int
) -> tuple[Array, Array]:
    """All tokens to every device; each adds up its own experts' part, and the parts are summed where tokens live."""
    axis, top_k = exchange.axis, slots.shape[1]
    with jax.named_scope("dispatch"):
        everyone = _move(x, exchange, lambda a: lax.all_gather(a, axis, tiled=True))
        slots, weights = (lax.all_gather(a, axis, tiled=True) for a in (slots, routing.weights))
        local = slots - lax.axis_index(axis) * slots_per_device
        is_here = (local >= 0) & (local < slots_per_device)
        order = plan_pairs(jnp.where(is_here, local, slots_per_device).reshape(-1), slots_per_device)
    with jax.named_scope("experts"):
        y = experts(everyone[order.pair_of_row // top_k], order.group_sizes)
    with jax.named_scope("combine"):
        part = _weigh(order, y, weights)  # y is zero for pairs of other devices
        return lax.psum_scatter(part, axis, tiled=True), jnp.sum(order.group_sizes)


def _all_to_all(
    exchange: Exchange, x: Array, routing: Routing, slots: Array, experts: Experts, slots_per_device: int
) -> tuple[Array, Array]:
    """Rounds of `capacity` rows from each device to each other; the first in straight code, so that other work can
    be scheduled beside it, the rest in a loop that nearly never turns.

    Two devices, capacity 2; this device has 3 rows for device 0 and 1 for device 1:

        sorted rows   a b c | d        first round sends [a b] and [d .], second round [c .] and [. .]
    """
    g, capacity, (num_tokens, top_k) = exchange.num_devices, exchange.capacity, slots.shape
    num_pairs, flat = num_tokens * top_k, slots.reshape(-1)
    with jax.named_scope("dispatch"):
        order = plan_pairs(flat, g * slots_per_device)
        to_device = jnp.sum(order.group_sizes.reshape(g, slots_per_device), axis=1)  # [G]
        first = jnp.cumsum(to_device) - to_device
        sorted_slot = flat[order.pair_of_row]
        device = jnp.minimum(sorted_slot // slots_per_device, g - 1)
        place = jnp.arange(num_pairs, dtype=jnp.int32) - first[device]  # among the rows for that device

    def one_round(turn: Array | int, y: Array) -> tuple[Array, Array]:
        with jax.named_scope("dispatch"):
            nth = turn * capacity + jnp.arange(capacity, dtype=jnp.int32)
            is_row = nth[None, :] < to_device[:, None]  # [G, C]
            row = jnp.where(is_row, first[:, None] + nth[None, :], 0).reshape(-1)
            slot = jnp.where(is_row.reshape(-1), sorted_slot[row] % slots_per_device, slots_per_device)
            sent = x[order.pair_of_row[row] // top_k]
            here, slot = _move_labelled(sent, slot, exchange, lambda a: _swap(a, exchange.axis))
            theirs = plan_pairs(slot, slots_per_device)
        with jax.named_scope("experts"):
            computed = experts(here[theirs.pair_of_row], theirs.group_sizes)
        with jax.named_scope("combine"):
            back = _swap(computed[theirs.row_of_pair], exchange.axis)
            in_round = (place >= turn * capacity) & (place < (turn + 1) * capacity)
            source = jnp.where(in_round, device * capacity + place - turn * capacity, 0)
            return jnp.where(in_round[:, None], back[source], y), jnp.sum(theirs.group_sizes)

    y, num_rows = one_round(0, jnp.zeros((num_pairs, x.shape[1]), x.dtype))
    if capacity < num_tokens * min(top_k, slots_per_device):
        rounds = -(-lax.pmax(jnp.max(to_device), exchange.axis) // capacity)

        def further(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            turn, y, num_rows = carry
            y, more = one_round(turn, y)
            return turn + 1, y, num_rows + more

        _, y, num_rows = lax.while_loop(lambda c: c[0] < rounds, further, (jnp.int32(1), y, num_rows))
    is_pair = jnp.arange(num_pairs) < jnp.sum(order.group_sizes)
    with jax.named_scope("combine"):
        return _weigh(order, jnp.where(is_pair[:, None], y, 0), routing.weights), num_rows


def _ragged(
    exchange: Exchange, x: Array, routing: Routing, slots: Array, experts: Experts, slots_per_device: int
) -> tuple[Array, Array]:
    """One exchange of exactly the rows there are; the buffers hold the most that can arrive."""
    g, axis, (num_tokens, top_k) = exchange.num_devices, exchange.axis, slots.shape
    flat, me = slots.reshape(-1), lax.axis_index(axis)
    with jax.named_scope("dispatch"):
        order = plan_pairs(flat, g * slots_per_device)
        to_device = jnp.sum(order.group_sizes.reshape(g, slots_per_device), axis=1)
        sent = lax.all_gather(to_device, axis)  # [source, destination]
        first = jnp.cumsum(to_device) - to_device  # where my rows for each device begin
        before = (jnp.cumsum(sent, axis=0) - sent)[me]  # where they go in that device's buffer
        arriving = sent[:, me]
        room = g * num_tokens * min(top_k, slots_per_device)

        def send(a: Array, fill: float) -> Array:
            buffer = jnp.full((room, *a.shape[1:]), fill, a.dtype)
            return lax.ragged_all_to_all(a, buffer, first, to_device, before, arriving, axis_name=axis)

        here = _move(x[order.pair_of_row // top_k], exchange, lambda a: send(a, 0))
        theirs = plan_pairs(
            send(flat[order.pair_of_row] % slots_per_device, slots_per_device), slots_per_device
        )
    with jax.named_scope("experts"):
        computed = experts(here[theirs.pair_of_row], theirs.group_sizes)[theirs.row_of_pair]
    with jax.named_scope("combine"):
        starts = jnp.cumsum(arriving) - arriving
        offsets = (jnp.cumsum(sent, axis=1) - sent)[:, me]  # where my rows lie in each source's order
        y = jnp.zeros((num_tokens * top_k, x.shape[1]), x.dtype)
        y = lax.ragged_all_to_all(computed, y, starts, arriving, offsets, to_device, axis_name=axis)
        return _weigh(order, y, routing.weights), jnp.sum(theirs.group_sizes)


def _swap(a: Array, axis: str) -> Array:
    """[G * C, ...]: the g-th part goes to device g; the g-th part of the result came from there."""
    return lax.all_to_all(a, axis, 0, 0, tiled=True)


def _move(x: Float[Array, "M D"], exchange: Exchange, move: Callable[[Array], Array]) -> Float[Array, "N D"]:
    """Tokens in the type that they travel in, and back to their own. fp8: one scale a row, so that its largest
    value is the largest that fp8 has."""
    if exchange.dispatch_dtype is None or exchange.dispatch_dtype == x.dtype:
        return move(x)
    if exchange.dispatch_dtype != FP8:
        return move(x.astype(exchange.dispatch_dtype)).astype(x.dtype)
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True), 1e-12) / FP8_MAX
    narrow, scale = move((wide / scale).astype(FP8)), move(scale)
    return (narrow.astype(jnp.float32) * scale).astype(x.dtype)


def _move_labelled(
    x: Float[Array, "M D"], label: Int[Array, " M"], exchange: Exchange, move: Callable[[Array], Array]
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """`_move` with an int32 for each row, whose bits travel as further columns: an exchange of their own would be small,
    and XLA waits for such a one where it stands."""
    wire = exchange.dispatch_dtype or x.dtype
    if wire == FP8:  # the bits go with the scale
        wide = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1, keepdims=True), 1e-12) / FP8_MAX
        narrow, extra = move((wide / scale).astype(FP8)), move(_with_bits(scale, label))
        return (narrow.astype(jnp.float32) * extra[:, :1]).astype(x.dtype), _bits_of(extra, 1)
    moved = move(_with_bits(x.astype(wire), label))
    return moved[:, : x.shape[1]].astype(x.dtype), _bits_of(moved, x.shape[1])


def _with_bits(x: Float[Array, "M D"], label: Int[Array, " M"]) -> Float[Array, "M D2"]:
    bits = lax.bitcast_convert_type(label.astype(jnp.int32), x.dtype).reshape(x.shape[0], -1)
    return jnp.concatenate([x, bits], axis=1)


def _bits_of(x: Float[Array, "M D2"], start: int) -> Int[Array, " M"]:
    bits = x[:, start:]
    return lax.bitcast_convert_type(bits[:, 0] if bits.shape[1] == 1 else bits, jnp.int32)


def _weigh(order: Dispatch, y: Float[Array, "N D"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
    """The weighted sum of each token's pairs, in float32."""
    picked = y[order.row_of_pair].reshape(*weights.shape, y.shape[-1]).astype(jnp.float32)
    return jnp.sum(picked * weights[:, :, None], axis=1)
