"""A better placement in few moves, from the one that serves now: what a running server does instead of starting over.

Each round takes the heaviest device of every layer and makes the one change that pays best:

- a spare slot of a light device (its expert has another copy) takes a copy of an expert of the heaviest: one move;
- two slots are exchanged: two moves where one of the experts has another copy, else four by way of a spare slot.

A change is made only if it takes `min_saving` off the heaviest device for every move, and a layer keeps the rounds up to the
one where the saving less the price of the moves is largest.
"""

from dataclasses import dataclass, replace

import numpy as np

from runtime.experts.balancer import checked_loads, lightest_devices
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import slot_shares

STUCK_ROUNDS = 8  # more than asked for, for layers in which several devices are equally heavy
MAX_SPARES = 12  # spare slots that a round looks at: those on the devices with the least other load


@dataclass(frozen=True, eq=False)
class Improvement:
    """placement: after the changes. saved: float64 [L], load taken off the heaviest device of each layer.
    num_moves: int64 [L], what the changes were priced at."""

    placement: ExpertPlacement
    saved: np.ndarray
    num_moves: np.ndarray


@dataclass(eq=False)
class _Rows:
    """Layers being changed. held [b, S]: experts of slots; on_slot [b, S]: their load; copies [b, E]."""

    held: np.ndarray
    on_slot: np.ndarray
    copies: np.ndarray
    loads: np.ndarray
    slots_per_device: int
    slots_per_node: int

    @property
    def index(self) -> np.ndarray:
        return np.arange(len(self.held))

    def take(self, layers: np.ndarray) -> "_Rows":
        return replace(
            self,
            held=self.held[layers],
            on_slot=self.on_slot[layers],
            copies=self.copies[layers],
            loads=self.loads[layers],
        )

    def put(self, layers: np.ndarray, part: "_Rows") -> None:
        self.held[layers], self.on_slot[layers], self.copies[layers] = part.held, part.on_slot, part.copies

    def by_device(self) -> np.ndarray:
        return self.on_slot.reshape(len(self.held), -1, self.slots_per_device).sum(axis=2)


def improve(
    placement: ExpertPlacement,
    loads: np.ndarray,
    *,
    min_saving: float | np.ndarray = 0.0,
    balance_weight: float = 0.0,
    max_rounds: int = 8,
    num_nodes: int = 1,
) -> Improvement:
    """Changes for expert loads [L, E].

    min_saving: load that one move must take off the heaviest device of its layer; a number or [L].
    balance_weight: expert_balance_weight; above 0 copies are taken to share as levels the devices, else equally.
    num_nodes: more than one keeps every expert on its node (hierarchical placements).
    """
    num_layers = placement.num_layers
    loads = checked_loads(loads, placement.num_experts, num_layers)
    min_saving = np.broadcast_to(np.asarray(min_saving, np.float64), (num_layers,))
    shares = slot_shares(placement, loads, 0.5 if balance_weight > 0 else 0.0)
    on_slot = np.take_along_axis(loads, placement.slot_experts, axis=1) * shares
    rows = _Rows(
        placement.slot_experts.astype(np.int64),
        on_slot,
        placement.copies.astype(np.int64),
        loads,
        placement.slots_per_device,
        placement.num_slots // num_nodes,
    )
    tops, moves, tables = [rows.by_device().max(axis=1)], [np.zeros(num_layers, np.int64)], [rows.held.copy()]
    active = np.arange(num_layers if placement.num_devices > 1 else 0)
    for turn in range(max_rounds + STUCK_ROUNDS if max_rounds else 0):
        if turn >= max_rounds:  # devices that were as heavy as the heaviest may still hide what was done
            active = active[tops[-1][active] >= tops[0][active] * (1 - 1e-9)]
        if not len(active):
            break
        part = rows.take(active)
        made = np.zeros(num_layers, np.int64)
        made[active] = _round(part, min_saving[active], is_levelled=balance_weight > 0)
        if balance_weight > 0:
            part.on_slot = _levelled(part, placement.num_devices)
        rows.put(active, part)
        active = active[made[active] > 0]
        tops.append(rows.by_device().max(axis=1))
        moves.append(moves[-1] + made)
        tables.append(rows.held.copy())
    saved = tops[0] - np.array(tops)  # [rounds, L]
    price = np.where(np.isfinite(min_saving), min_saving, 0)  # nothing was moved where it is not
    net = saved - np.array(moves) * price
    best = np.argmax(net - 1e-12 * np.array(moves) * (tops[0] + 1e-300), axis=0)
    layer = np.arange(num_layers)
    table = np.array(tables)[best, layer]
    after = ExpertPlacement(table, placement.num_devices, placement.num_experts)
    return Improvement(after, saved[best, layer], np.array(moves)[best, layer])


def _levelled(rows: _Rows, num_devices: int) -> np.ndarray:
    """Loads of slots [b, S] when copies share anew: a further copy relieves all devices that hold its expert."""
    placement = ExpertPlacement(rows.held, num_devices, rows.loads.shape[1])
    return np.take_along_axis(rows.loads, rows.held, axis=1) * slot_shares(placement, rows.loads, 0.5)


def _round(rows: _Rows, min_saving: np.ndarray, is_levelled: bool) -> np.ndarray:
    """Makes at most one change in each layer; returns the moves of each [b], 0 for none."""
    by_device = rows.by_device()
    top_device = by_device.argmax(axis=1)
    copy_net, copy_change = _best_copy(rows, by_device, top_device, min_saving, is_levelled)
    swap_net, swap_change, swap_moves = _best_exchange(rows, by_device, top_device, min_saving)
    made = np.zeros(len(copy_net), np.int64)
    is_copy = (copy_net >= swap_net) & (copy_net > 0)
    is_swap = (swap_net > copy_net) & (swap_net > 0)
    at = np.flatnonzero(is_copy)
    if len(at):
        source, spare, amount = (part[at] for part in copy_change)
        _put_copy(rows, at, source, spare, amount)
        made[at] = 1
    at = np.flatnonzero(is_swap)
    if len(at):
        one, two = (part[at] for part in swap_change)
        rows.held[at, one], rows.held[at, two] = rows.held[at, two], rows.held[at, one]
        rows.on_slot[at, one], rows.on_slot[at, two] = rows.on_slot[at, two], rows.on_slot[at, one]
        made[at] = swap_moves[at]
    if not is_levelled:
        per_copy = rows.loads / rows.copies
        rows.on_slot = np.take_along_axis(per_copy, rows.held, axis=1)
    return made


def _best_copy(
    rows: _Rows, by_device: np.ndarray, top_device: np.ndarray, min_saving: np.ndarray, is_levelled: bool
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The best spare slot to take a copy from the heaviest device: net saving [b], and (source slot, spare slot, load
    that goes over) of it."""
    i, width = rows.index, rows.slots_per_device
    num_slots = rows.held.shape[1]
    device_of = np.arange(num_slots) // width
    rest = by_device[:, device_of] - rows.on_slot  # [b, S] load of the slot's device without it
    is_spare = np.take_along_axis(rows.copies, rows.held, axis=1) > 1
    is_spare &= (device_of != top_device[:, None]) & _same_node(rows, top_device * width)
    count = min(MAX_SPARES, num_slots)
    spares = np.argpartition(np.where(is_spare, rest, np.inf), count - 1, axis=1)[:, :count]  # [b, R]
    usable = np.take_along_axis(is_spare, spares, axis=1)
    sources = top_device[:, None] * width + np.arange(width)  # [b, K]
    experts = np.take_along_axis(rows.held, sources, axis=1)
    given = np.take_along_axis(rows.on_slot, sources, axis=1)  # [b, K]
    displaced = np.take_along_axis(rows.on_slot, spares, axis=1)  # [b, R]
    rest = np.take_along_axis(rest, spares, axis=1)
    others = _other_devices(
        rows, by_device, spares
    )  # [b, R, S]: loads of devices with the displaced expert, else inf
    top = by_device[i, top_device]
    if is_levelled:
        amount = np.clip((top[:, None, None] - rest[:, None]) / 2, 0, given[..., None])  # [b, K, R]
        lifted = others.min(axis=2) + displaced
        relief = amount
    else:
        after_copies = np.take_along_axis(rows.copies, experts, axis=1) + 1
        load = np.take_along_axis(rows.loads, experts, axis=1)
        amount = np.broadcast_to((load / after_copies)[..., None], (*given.shape, count))
        relief = (given - load / after_copies)[..., None]
        left = np.take_along_axis(rows.copies, np.take_along_axis(rows.held, spares, axis=1), axis=1) - 1
        lifted = np.where(np.isinf(others), -np.inf, others).max(axis=2) + displaced / np.maximum(left, 1)
    after = np.maximum(top[:, None, None] - relief, np.maximum(rest[:, None] + amount, lifted[:, None]))
    held = rows.held.reshape(len(i), -1, width)[i[:, None], device_of[spares]]  # [b, R, K]
    has_it = (experts[:, :, None, None] == held[:, None]).any(axis=3)
    after = np.where(has_it | ~usable[:, None], np.inf, after).reshape(len(i), -1)
    best = after.argmin(axis=1)
    source, spare = np.divmod(best, count)
    net = top - after[i, best] - np.maximum(min_saving, 1e-9 * top)
    return net, (sources[i, source], spares[i, spare], amount[i, source, spare])


def _other_devices(rows: _Rows, by_device: np.ndarray, spares: np.ndarray) -> np.ndarray:
    """[b, R, S]: the load of each other slot's device that holds the spare slot's expert, else inf."""
    expert = np.take_along_axis(rows.held, spares, axis=1)
    is_other = rows.held[:, None] == expert[..., None]
    np.put_along_axis(is_other, spares[..., None], False, axis=2)
    return np.where(is_other, np.repeat(by_device, rows.slots_per_device, axis=1)[:, None], np.inf)


def _put_copy(rows: _Rows, at: np.ndarray, source: np.ndarray, spare: np.ndarray, amount: np.ndarray) -> None:
    """The spare slot takes over `amount` from the source slot; what it had goes to the lightest other copy."""
    by_device = rows.by_device()[at]
    old, new = rows.held[at, spare], rows.held[at, source]
    is_other = rows.held[at] == old[:, None]
    is_other[np.arange(len(at)), spare] = False
    other = np.where(is_other, np.repeat(by_device, rows.slots_per_device, axis=1), np.inf).argmin(axis=1)
    rows.on_slot[at, other] += rows.on_slot[at, spare]
    rows.on_slot[at, spare] = amount
    rows.on_slot[at, source] -= amount
    rows.held[at, spare] = new
    rows.copies[at, old] -= 1
    rows.copies[at, new] += 1


def _best_exchange(
    rows: _Rows, by_device: np.ndarray, top_device: np.ndarray, min_saving: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The best exchange of a slot of the heaviest device: net saving [b], (its slot, the other), moves [b]."""
    i, width = rows.index, rows.slots_per_device
    partners = lightest_devices(by_device, top_device)  # [b, P]
    mine = top_device[:, None] * width + np.arange(width)  # [b, K]
    theirs = (partners[..., None] * width + np.arange(width)).reshape(len(i), -1)  # [b, P * K]
    change = (
        np.take_along_axis(rows.on_slot, mine, axis=1)[..., None]
        - np.take_along_axis(rows.on_slot, theirs, axis=1)[:, None]
    )  # [b, K, P * K]
    top = by_device[i, top_device]
    after = np.maximum(
        top[:, None, None] - change,
        np.repeat(by_device[i[:, None], partners], width, axis=1)[:, None] + change,
    )
    one, two = np.take_along_axis(rows.held, mine, axis=1), np.take_along_axis(rows.held, theirs, axis=1)
    same = (one[..., None] == two[:, None]).reshape(len(i), width, -1, width)  # [b, K, P, K]
    clash = same.any(axis=3)[..., None] | same.any(axis=1)[:, None]
    outside = ~np.take_along_axis(_same_node(rows, top_device * width), theirs, axis=1)
    after = np.where(clash.reshape(after.shape) | outside[:, None], np.inf, after)
    copies = [np.take_along_axis(rows.copies, experts, axis=1) for experts in (one, two)]
    has_spare = (copies[0][..., None] > 1) | (copies[1][:, None] > 1)
    num_moves = np.where(has_spare | (rows.held.shape[1] == rows.loads.shape[1]), 2, 4)
    net = (
        top[:, None, None] - after - num_moves * np.maximum(min_saving, 1e-9 * top)[:, None, None]
    ).reshape(len(i), -1)
    best = net.argmax(axis=1)
    slot, other = np.divmod(best, theirs.shape[1])
    return net[i, best], (mine[i, slot], theirs[i, other]), num_moves[i, slot, other]


def _same_node(rows: _Rows, slot: np.ndarray) -> np.ndarray:
    """bool [b, S]: whether each slot is on the node of `slot` [b]."""
    node = np.arange(rows.held.shape[1]) // rows.slots_per_node
    return node == (slot // rows.slots_per_node)[:, None]
