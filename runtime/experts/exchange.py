"""Tokens to the devices that hold their experts and back: three exchanges behind one signature.

Runs inside `shard_map`: every array here is one device's share. S expert slots a device, G devices, slot p of all
P = G * S lies on device p // S. A pair is one (token, choice), numbered token * k + choice. No exchange ever drops a
pair: where a buffer is full, the rest goes in a further round.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from runtime.experts.all_to_all import exchange_by_pair, exchange_by_token
from runtime.experts.dispatch import plan_on_device, plan_pairs, weigh
from runtime.experts.exchange_kind import ExchangeKind
from runtime.experts.exchange_spec import Exchange, Experts
from runtime.experts.router import Routing
from runtime.experts.sharing import CopyTable, label_rows, slots_by_own_rows, slots_of_labels
from runtime.experts.stages import Stages
from runtime.experts.wire import from_wire, to_wire


def exchange_tokens(
    exchange: Exchange,
    x: Float[Array, "T D"],
    routing: Routing,
    copies: CopyTable,
    is_real: Bool[Array, " T"],
    experts: Experts,
    slots_per_device: int,
) -> Stages[tuple[Float[Array, "T D"], Int[Array, ""]]]:
    """(weighted sum of each token's experts in float32, rows that this device computed).

    x: in the type of the weights. copies: the slots of each expert; which of them a row takes is settled here, by the rows of
    all devices in `gather`, by this device's own elsewhere. The stages are those of `all_to_all`; the other exchanges run
    inside the first.
    """
    if exchange.kind is ExchangeKind.GATHER:
        return _gather(exchange, x, routing, copies, is_real, experts, slots_per_device)
    with jax.named_scope("dispatch"):
        me = lax.axis_index(exchange.axis)
        slots = slots_by_own_rows(copies, routing.expert_ids, is_real, me)
    work = (exchange, x, routing, slots, experts, slots_per_device)
    if exchange.kind is ExchangeKind.RAGGED:
        return _ragged(*work)
    has_room_for_all = exchange.capacity >= x.shape[0] * min(slots.shape[1], slots_per_device)
    return (yield from (exchange_by_token if has_room_for_all else exchange_by_pair)(*work))


def _gather(
    exchange: Exchange,
    x: Array,
    routing: Routing,
    copies: CopyTable,
    is_real: Array,
    experts: Experts,
    slots_per_device: int,
) -> tuple[Array, Array]:
    """All tokens to every device; each adds up its own experts' part, and the parts are summed where tokens live."""
    axis, (num_tokens, top_k) = exchange.axis, routing.expert_ids.shape
    with jax.named_scope("dispatch"):
        everyone = _move(x, exchange, lambda a: lax.all_gather(a, axis, tiled=True))
        labels, weights = (
            lax.all_gather(a, axis)
            for a in (label_rows(copies, routing.expert_ids, is_real), routing.weights)
        )
        weights = weights.reshape(-1, top_k)
        slots = slots_of_labels(copies, labels, num_tokens * top_k).reshape(-1, top_k)
        order = plan_on_device(slots, lax.axis_index(axis), slots_per_device)
    with jax.named_scope("experts"):
        y = experts(everyone[order.pair_of_row // top_k], order.group_sizes)
    with jax.named_scope("combine"):
        part = weigh(order, y, weights)  # y is zero for pairs of other devices
        return lax.psum_scatter(part, axis, tiled=True), jnp.sum(order.group_sizes)


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
        return weigh(order, y, routing.weights), jnp.sum(theirs.group_sizes)


def _move(x: Float[Array, "M D"], exchange: Exchange, move: Callable[[Array], Array]) -> Float[Array, "N D"]:
    """Rows in the type that they travel in, and back to their own."""
    arrived = tuple(move(a) for a in to_wire(x, exchange.dispatch_dtype))
    return from_wire(arrived, x.dtype, x.shape[1])[0]
