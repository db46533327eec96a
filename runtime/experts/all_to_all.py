"""The exchange for large steps: by pair, in rounds of fixed room, or by token where there is room for all in one.

Both are stages (`stages.py`) around two exchanges, so that other work can be put beside them. `exchange.py` says what S, G
and a pair are.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from runtime.experts.dispatch import plan_on_device, plan_pairs, weigh
from runtime.experts.exchange_spec import Exchange, Experts
from runtime.experts.router import Routing
from runtime.experts.stages import Parcel, Stages, run_alone
from runtime.experts.wire import from_wire, to_wire


def exchange_by_token(
    exchange: Exchange,
    x: Float[Array, "T D"],
    routing: Routing,
    slots: Int[Array, "T k"],
    experts: Experts,
    slots_per_device: int,
) -> Stages[tuple[Float[Array, "T D"], Int[Array, ""]]]:
    """Every device gets each token once, with its slots and weights, and returns one row for it: the weighted sum of its
    own experts, in the type of the weights; the parts are summed in float32.

    One round for any routing, with a k-th of the bytes that rows for all pairs take.
    """
    g, (num_tokens, top_k), width = exchange.num_devices, slots.shape, x.shape[1]
    with jax.named_scope("dispatch"):
        weight_bits = lax.bitcast_convert_type(routing.weights.astype(jnp.float32), jnp.int32)
        sent = to_wire(x, exchange.dispatch_dtype, jnp.concatenate([slots, weight_bits], axis=1))
        to_all = tuple(jnp.tile(a, (g, 1)) for a in sent)
    arrived = yield Parcel("dispatch", exchange.axis, to_all)
    with jax.named_scope("dispatch"):
        here, labels = from_wire(arrived, x.dtype, width)
        order = plan_on_device(labels[:, :top_k], lax.axis_index(exchange.axis), slots_per_device)
        weights = lax.bitcast_convert_type(labels[:, top_k:], jnp.float32)
    with jax.named_scope("experts"):
        computed = experts(here[order.pair_of_row // top_k], order.group_sizes)
    with jax.named_scope("combine"):
        part = weigh(order, computed, weights).astype(x.dtype)  # zero for pairs of other devices
    (back,) = yield Parcel("combine", exchange.axis, (part,))
    with jax.named_scope("combine"):
        parts = back.reshape(g, num_tokens, width).astype(jnp.float32)
        return jnp.sum(parts, axis=0), jnp.sum(order.group_sizes)


def exchange_by_pair(
    exchange: Exchange,
    x: Float[Array, "T D"],
    routing: Routing,
    slots: Int[Array, "T k"],
    experts: Experts,
    slots_per_device: int,
) -> Stages[tuple[Float[Array, "T D"], Int[Array, ""]]]:
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

    def one_round(turn: Array | int, y: Array) -> Stages[tuple[Array, Array]]:
        with jax.named_scope("dispatch"):
            nth = turn * capacity + jnp.arange(capacity, dtype=jnp.int32)
            is_row = nth[None, :] < to_device[:, None]  # [G, C]
            row = jnp.where(is_row, first[:, None] + nth[None, :], 0).reshape(-1)
            slot = jnp.where(is_row.reshape(-1), sorted_slot[row] % slots_per_device, slots_per_device)
            sent = to_wire(x[order.pair_of_row[row] // top_k], exchange.dispatch_dtype, slot[:, None])
        arrived = yield Parcel("dispatch", exchange.axis, sent)
        with jax.named_scope("dispatch"):
            here, labels = from_wire(arrived, x.dtype, x.shape[1])
            theirs = plan_pairs(labels[:, 0], slots_per_device)
        with jax.named_scope("experts"):
            computed = experts(here[theirs.pair_of_row], theirs.group_sizes)
        with jax.named_scope("combine"):
            results = computed[theirs.row_of_pair]
        (back,) = yield Parcel("combine", exchange.axis, (results,))
        with jax.named_scope("combine"):
            in_round = (place >= turn * capacity) & (place < (turn + 1) * capacity)
            source = jnp.where(in_round, device * capacity + place - turn * capacity, 0)
            return jnp.where(in_round[:, None], back[source], y), jnp.sum(theirs.group_sizes)

    y, num_rows = yield from one_round(0, jnp.zeros((num_pairs, x.shape[1]), x.dtype))
    rounds = -(-lax.pmax(jnp.max(to_device), exchange.axis) // capacity)

    def further(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, y, num_rows = carry
        y, more = run_alone(one_round(turn, y))
        return turn + 1, y, num_rows + more

    _, y, num_rows = lax.while_loop(lambda c: c[0] < rounds, further, (jnp.int32(1), y, num_rows))
    is_pair = jnp.arange(num_pairs) < jnp.sum(order.group_sizes)
    with jax.named_scope("combine"):
        return weigh(order, jnp.where(is_pair[:, None], y, 0), routing.weights), num_rows
