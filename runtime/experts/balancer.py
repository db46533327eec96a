"""A placement from loads: how many copies each expert gets, and which device holds them. Pure array functions.

The outline is DeepSeek's EPLB (see `greedy_balancer.py`): spare slots go one by one to the highest load per copy, then
copies are packed; hierarchically where groups of experts divide over nodes. What differs:

- Two copies of an expert never share a device, by construction: copies are handed out in rounds of one slot for every
  device, and the one expert that may straddle two rounds avoids the devices it already has.
- With two slots a device copies are chosen for the pairs that they will be part of (`pairing.py`).
- The packing is refined by exchanges between the heaviest device and light ones for a few rounds.
- Where copies are handed out an uncertain load counts as more than its estimate, so what may become hot gets them first.
- On nodes, groups that are used by the same tokens are brought together while the nodes stay balanced.

Everything is vectorised over layers: rows b below are layers, or layers times nodes. A load is any number proportional to
an expert's tokens.
"""

from dataclasses import dataclass

import numpy as np

from runtime.experts.pairing import choose_copies_in_pairs
from runtime.experts.placement import ExpertPlacement

MAX_PARTNERS = 4  # devices that the heaviest may exchange with: the lightest, where the best exchanges are
EVEN_ENOUGH = 1e-3  # imbalance that is not worth an exchange; sampling noise is many times that
NODE_SLACK = 0.02  # how far above the mean a node may come for the sake of affinity


@dataclass(frozen=True)
class SlotShape:
    """What experts are placed on. Hierarchical if num_groups is more than one and divides over the nodes.

    ValueError where the experts of a node do not fit its slots.
    """

    num_experts: int
    num_devices: int
    slots_per_device: int
    num_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if (
            min(self.num_experts, self.num_devices, self.slots_per_device, self.num_groups, self.num_nodes)
            < 1
        ):
            raise ValueError(f"every number of {self} must be at least 1")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups {self.num_groups} does not divide num_experts {self.num_experts}")
        if self.num_devices % self.num_nodes:
            raise ValueError(f"num_nodes {self.num_nodes} does not divide num_devices {self.num_devices}")
        experts_of_node = self.num_experts // (self.num_nodes if self.is_hierarchical else 1)
        if not self.num_experts <= self.num_devices * self.slots_per_device:
            raise ValueError(
                f"{self.num_experts} experts do not fit {self.num_devices} x {self.slots_per_device} slots"
            )
        if self.slots_per_device > experts_of_node:
            raise ValueError(
                f"slots_per_device {self.slots_per_device} is more than the {experts_of_node} experts to choose from: "
                "a device would hold one twice"
            )

    @property
    def is_hierarchical(self) -> bool:
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0


def balance(
    loads: np.ndarray,
    shape: SlotShape,
    *,
    uncertainty: np.ndarray | None = None,
    affinity: np.ndarray | None = None,
    max_exchanges: int = 4,
) -> ExpertPlacement:
    """The placement of experts with `loads` [L, E].

    uncertainty: [L, E], added to a load when copies are handed out, in the loads' unit; packing goes by the loads.
    affinity: [L, G, G], tokens that use both groups; only on nodes. Experts are groups where num_groups is num_experts.
    max_exchanges: rounds of refinement, one exchange a layer and round.
    """
    loads = checked_loads(loads, shape.num_experts)
    loads = np.where(loads.sum(axis=1, keepdims=True) > 0, loads, 1.0)  # a layer without load counts as even
    extra = np.zeros_like(loads) if uncertainty is None else checked_loads(uncertainty, *loads.shape[::-1])
    if not shape.is_hierarchical:
        slots = _balance_rows(loads, extra, shape.num_devices, shape.slots_per_device, max_exchanges)
        return ExpertPlacement(slots, shape.num_devices, shape.num_experts)
    experts = node_experts(loads, shape, affinity)  # [L, nodes, E / nodes]
    rows = experts.reshape(-1, experts.shape[2])
    of_nodes, extra = (
        np.take_along_axis(np.repeat(x, shape.num_nodes, axis=0), rows, axis=1) for x in (loads, extra)
    )
    devices = shape.num_devices // shape.num_nodes
    held = _balance_rows(of_nodes, extra, devices, shape.slots_per_device, max_exchanges)
    slots = np.take_along_axis(rows, held, axis=1).reshape(len(loads), -1)
    return ExpertPlacement(slots, shape.num_devices, shape.num_experts)


def checked_loads(loads: np.ndarray, num_experts: int, num_layers: int | None = None) -> np.ndarray:
    """float64 [L, E]; ValueError unless finite, not negative and of that shape (any number of layers if None)."""
    given = np.asarray(loads, dtype=np.float64)
    if given.ndim != 2 or given.shape != (num_layers or len(given), num_experts):
        raise ValueError(f"loads must be [{num_layers or 'layers'}, {num_experts}], not {list(given.shape)}")
    if not np.isfinite(given).all() or (given < 0).any():
        raise ValueError("loads must be finite and not negative")
    return given


def choose_copies(loads: np.ndarray, num_slots: int, max_copies: int) -> np.ndarray:
    """int64 [b, E]: copies that minimise the highest load per copy, for loads [b, E] and num_slots in all."""
    rows = np.arange(len(loads))
    copies = np.ones(loads.shape, np.int64)
    per_copy = loads.copy()
    for _ in range(num_slots - loads.shape[1]):
        hottest = per_copy.argmax(axis=1)
        copies[rows, hottest] += 1
        now = copies[rows, hottest]
        # An expert with a copy on every device counts as cold: more copies would have to share a device.
        per_copy[rows, hottest] = np.where(now < max_copies, loads[rows, hottest] / now, -1.0)
    return copies


def pack_rounds(experts: np.ndarray, weights: np.ndarray, num_bins: int) -> np.ndarray:
    """Items [b, bins, n / bins] of each bin: in every round the heaviest items left go to the lightest bins, one each.

    experts: [b, n] of items by falling weight, the copies of an expert side by side, at most num_bins of them.
    weights: [b, n]. Returns places in 0..n-1.
    """
    num_rows, num_items = experts.shape
    num_rounds = num_items // num_bins
    rows = np.arange(num_rows)[:, None]
    filled = np.zeros((num_rows, num_bins))
    packed = np.empty((num_rows, num_bins, num_rounds), np.int64)
    has_straddler = np.zeros((num_rows, num_bins), bool)
    bins = np.empty((num_rows, num_bins), np.int64)
    for turn in range(num_rounds):
        first = turn * num_bins
        items = slice(first, first + num_bins)
        previous, bins = bins, np.argsort(filled, axis=1, kind="stable")
        if turn > 0:
            # The expert at the end of the round before may have copies left: they go first, to bins without it.
            straddler = experts[:, first - 1]
            num_left = (experts[:, items] == straddler[:, None]).sum(axis=1)
            has_straddler[:] = False
            has_straddler[rows, previous] = experts[:, first - num_bins : first] == straddler[:, None]
            is_free = ~has_straddler[rows, bins]
            goes_first = is_free & (np.cumsum(is_free, axis=1) <= num_left[:, None])
            bins = np.take_along_axis(bins, np.argsort(~goes_first, axis=1, kind="stable"), axis=1)
        packed[rows, bins, turn] = np.arange(first, first + num_bins)
        filled[rows, bins] += weights[:, items]
    return packed


def exchange_with_heaviest(held: np.ndarray, per_copy: np.ndarray, max_exchanges: int) -> np.ndarray:
    """Device tables [b, D, K] after exchanges of a slot of the heaviest device with one of the lightest, the best first.

    per_copy: [b, E], load per copy. A row ends where no exchange leaves both devices below what the heaviest was.
    """
    held = held.copy()
    num_devices = held.shape[1]
    active = np.arange(len(held)) if num_devices > 1 else np.arange(0)
    for _ in range(max_exchanges):
        if not len(active):
            break
        table = held[active]
        rows = np.arange(len(active))
        weights = np.take_along_axis(per_copy[active], table.reshape(len(active), -1), axis=1).reshape(
            table.shape
        )
        device_loads = weights.sum(axis=2)
        heaviest = device_loads.argmax(axis=1)
        top = device_loads[rows, heaviest]
        partners = lightest_devices(device_loads, heaviest)  # [a, P]
        theirs = table[rows[:, None], partners]  # [a, P, K]
        change = weights[rows, heaviest][:, None, :, None] - weights[rows[:, None], partners][:, :, None]
        after = np.maximum(
            top[:, None, None, None] - change, device_loads[rows[:, None], partners][..., None, None] + change
        )  # [a, P, K of the heaviest, K of the partner]
        same = table[rows, heaviest][:, None, :, None] == theirs[:, :, None]
        after[same.any(axis=3)[..., None] | same.any(axis=2)[:, :, None]] = np.inf
        after = after.reshape(len(active), -1)
        best = after.argmin(axis=1)
        is_uneven = top > device_loads.mean(axis=1) * (1 + EVEN_ENOUGH)
        chosen = np.flatnonzero((after[rows, best] < top * (1 - 1e-9)) & is_uneven)
        place, slot, other = _unravel(best[chosen], theirs.shape[2])
        layer, one, two = active[chosen], heaviest[chosen], partners[chosen, place]
        held[layer, one, slot], held[layer, two, other] = held[layer, two, other], held[layer, one, slot]
        active = layer
    return held


def lightest_devices(device_loads: np.ndarray, heaviest: np.ndarray) -> np.ndarray:
    """[b, P]: the MAX_PARTNERS devices with the least load, never the heaviest itself."""
    num_partners = min(MAX_PARTNERS, device_loads.shape[1] - 1)
    loads = device_loads.copy()
    loads[np.arange(len(loads)), heaviest] = np.inf
    return np.argpartition(loads, num_partners - 1, axis=1)[:, :num_partners]


def _unravel(best: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in [P, K, K] from flat places."""
    place, pair = np.divmod(best, width * width)
    slot, other = np.divmod(pair, width)
    return place, slot, other


def node_experts(loads: np.ndarray, shape: SlotShape, affinity: np.ndarray | None = None) -> np.ndarray:
    """int64 [L, nodes, E / nodes]: whole groups on nodes, equally many, balanced; then by affinity while they stay so."""
    num_layers = len(loads)
    by_group = loads.reshape(num_layers, shape.num_groups, -1).sum(axis=2)
    order = np.argsort(-by_group, axis=1, kind="stable")
    weights = np.take_along_axis(by_group, order, axis=1)
    places = pack_rounds(order, weights, shape.num_nodes)
    groups = np.take_along_axis(order, places.reshape(num_layers, -1), axis=1).reshape(places.shape)
    groups = exchange_with_heaviest(groups, by_group, max_exchanges=shape.num_groups)
    if affinity is not None:
        groups = _bring_together(groups, by_group, affinity)
    width = shape.num_experts // shape.num_groups
    return (groups[..., None] * width + np.arange(width)).reshape(num_layers, shape.num_nodes, -1)


def _bring_together(groups: np.ndarray, by_group: np.ndarray, affinity: np.ndarray) -> np.ndarray:
    """Node tables [L, N, g] after exchanges of groups that raise the tokens whose groups share a node, best first.

    No node gets heavier than the heaviest was, or than the mean and NODE_SLACK.
    """
    num_layers, num_nodes, width = groups.shape
    num_groups = num_nodes * width
    together = np.asarray(affinity, np.float64)
    if together.shape != (num_layers, num_groups, num_groups) or not np.isfinite(together).all():
        raise ValueError(
            f"affinity must be finite [{num_layers}, {num_groups}, {num_groups}], not {list(together.shape)}"
        )
    together = together + together.swapaxes(1, 2)
    together[:, np.arange(num_groups), np.arange(num_groups)] = 0
    rows = np.arange(num_layers)
    node_of = np.empty((num_layers, num_groups), np.int64)
    np.put_along_axis(
        node_of, groups.reshape(num_layers, -1), np.repeat(np.arange(num_nodes), width)[None], axis=1
    )
    for _ in range(4 * num_groups):
        member = node_of[:, :, None] == np.arange(num_nodes)  # [L, G, N]
        load = (by_group[:, :, None] * member).sum(axis=1)  # [L, N]
        limit = np.maximum(load.max(axis=1), load.mean(axis=1) * (1 + NODE_SLACK)) * (1 + 1e-12)
        ties = together @ member  # [L, G, N] tokens that each group shares with each node
        own = np.take_along_axis(ties, node_of[:, :, None], axis=2)[..., 0]
        other = np.take_along_axis(
            ties, node_of[:, None, :].repeat(num_groups, axis=1), axis=2
        )  # [L, g, node of h]
        gain = other + other.swapaxes(1, 2) - own[:, :, None] - own[:, None, :] - 2 * together
        heavier = by_group[:, None, :] - by_group[:, :, None]  # what g's node gains by taking h for g
        after = np.take_along_axis(load, node_of, axis=1)[:, :, None] + heavier
        is_allowed = (after <= limit[:, None, None]) & (after.swapaxes(1, 2) <= limit[:, None, None])
        is_allowed &= node_of[:, :, None] != node_of[:, None, :]
        gain = np.where(is_allowed, gain, -np.inf).reshape(num_layers, -1)
        best = gain.argmax(axis=1)
        chosen = np.flatnonzero(gain[rows, best] > 1e-9 * (1 + together.sum(axis=(1, 2))))
        if not len(chosen):
            break
        one, two = np.divmod(best[chosen], num_groups)
        node_of[chosen, one], node_of[chosen, two] = node_of[chosen, two], node_of[chosen, one]
    return np.argsort(node_of, axis=1, kind="stable").reshape(groups.shape)


def _balance_rows(
    loads: np.ndarray, extra: np.ndarray, num_devices: int, slots_per_device: int, max_exchanges: int
) -> np.ndarray:
    """[b, S] experts of slots for loads [b, E] on devices that are all alike.

    Loads with what is `extra` for safety decide who gets copies; but where a copy alone is more than a device's mean
    load, spare slots are so scarce that they go by the loads.
    """
    num_slots = num_devices * slots_per_device
    by_load = choose_copies(loads, num_slots, num_devices)
    if extra.any():
        has_room = (loads / by_load).max(axis=1) * num_devices < loads.sum(axis=1)
        copies = np.where(has_room[:, None], choose_copies(loads + extra, num_slots, num_devices), by_load)
    else:
        copies = by_load
    held = _pack(loads, copies, num_devices, max_exchanges)
    if slots_per_device == 2:
        in_pairs = choose_copies_in_pairs(loads, by_load, num_devices)
        other = _pack(loads, in_pairs, num_devices, max_exchanges)
        is_better = _top(loads / in_pairs, other) < _top(loads / copies, held)
        held = np.where(is_better[:, None, None], other, held)
    return held.reshape(len(loads), num_slots)


def _pack(loads: np.ndarray, copies: np.ndarray, num_devices: int, max_exchanges: int) -> np.ndarray:
    """Experts of slots [b, D, K] for copies [b, E] that fill all slots."""
    per_copy = loads / copies
    order = np.argsort(-per_copy, axis=1, kind="stable")
    counts = np.take_along_axis(copies, order, axis=1)
    experts = np.repeat(order.ravel(), counts.ravel()).reshape(len(loads), -1)
    weights = np.take_along_axis(per_copy, experts, axis=1)
    places = pack_rounds(experts, weights, num_devices)
    held = np.take_along_axis(experts, places.reshape(len(loads), -1), axis=1).reshape(places.shape)
    return exchange_with_heaviest(held, per_copy, max_exchanges)


def _top(per_copy: np.ndarray, held: np.ndarray) -> np.ndarray:
    """[b]: the load of the heaviest device of tables [b, D, K]."""
    on_slots = np.take_along_axis(per_copy, held.reshape(len(held), -1), axis=1)
    return on_slots.reshape(held.shape).sum(axis=2).max(axis=1)
