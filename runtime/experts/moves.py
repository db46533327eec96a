"""The order of moves between two placements, such that serving can go on after each of them.

Slots of a device are equal, and so are devices of a node and nodes among themselves: the target is first relabelled to
what keeps the most weights where they are. Layers are independent of each other.
"""

import numpy as np

from runtime.experts.placement import ExpertPlacement, Move


def relabel(before: ExpertPlacement, after: ExpertPlacement, num_nodes: int = 1) -> ExpertPlacement:
    """`after` with nodes, devices within a node and slots within a device renamed to agree with `before`.

    Loads stay what they were, up to the names of the devices. Devices are matched greedily by the experts they share;
    a layer keeps its own names where that is no worse.
    """
    _check_comparable(before, after, num_nodes)
    changed = np.flatnonzero(np.any(before.slot_experts != after.slot_experts, axis=1))
    if not len(changed):
        return after
    old, new = before.device_experts[changed], after.device_experts[changed]
    shared = _present(old, before.num_experts) @ _present(new, after.num_experts).swapaxes(1, 2)  # [l, D, D]
    device_of = _match_devices(shared, num_nodes)  # [l, D]: the device of `after` that takes each place
    renamed = np.take_along_axis(new, device_of[:, :, None], axis=1)
    slot_experts = after.slot_experts.copy()
    slot_experts[changed] = _keep_slots(old, renamed).reshape(len(changed), after.num_slots)
    return ExpertPlacement(slot_experts, after.num_devices, after.num_experts)


def plan_moves(before: ExpertPlacement, after: ExpertPlacement, num_nodes: int = 1) -> tuple[Move, ...]:
    """Moves from `before` to `relabel(before, after)`, layer by layer; every placement on the way is valid.

    A move overwrites only a slot whose expert has another copy. Where the rest is a ring of only copies, one of them
    waits in a spare slot of another device, which is restored at the end (two moves more than the ring has slots);
    where the layer has no spare slot, the ring is resolved by exchanges.
    """
    target = relabel(before, after, num_nodes)
    changed = np.flatnonzero(np.any(before.slot_experts != target.slot_experts, axis=1))
    moves: list[Move] = []
    for layer in changed:
        order = _LayerOrder(int(layer), before, target, num_nodes)
        order.run()
        moves += order.moves
    return tuple(moves)


class _LayerOrder:
    """One layer's moves being put in order. `held` is the layer's row as it is after the moves so far."""

    def __init__(self, layer: int, before: ExpertPlacement, target: ExpertPlacement, num_nodes: int) -> None:
        self.layer = layer
        self.held: list[int] = before.slot_experts[layer].tolist()
        self.target: list[int] = target.slot_experts[layer].tolist()
        self.slots_per_device = before.slots_per_device
        self.slots_per_node = before.num_slots // num_nodes
        self.slots_of: list[set[int]] = [set() for _ in range(before.num_experts)]
        for slot, expert in enumerate(self.held):
            self.slots_of[expert].add(slot)
        self.pending = {slot for slot, expert in enumerate(self.held) if expert != self.target[slot]}
        self.moves: list[Move] = []

    def run(self) -> None:
        while self.pending:
            slot = self._next_free_slot()
            if slot is not None:
                self._move(slot, self.target[slot])
            elif not self._wait_in_spare_slot():
                slot = min(self.pending)
                (partner,) = self.slots_of[self.target[slot]]
                self._exchange(slot, partner)

    def _next_free_slot(self) -> int | None:
        """A slot that may be overwritten; first one whose move frees another, so that rings end before copies go."""
        fallback = None
        for slot in sorted(self.pending):
            if len(self.slots_of[self.held[slot]]) < 2:
                continue
            wanted = self.slots_of[self.target[slot]]
            if len(wanted) == 1 and wanted <= self.pending:
                return slot
            fallback = slot if fallback is None else fallback
        return fallback

    def _wait_in_spare_slot(self) -> bool:
        """Breaks one ring: its expert waits in a spare slot, the ring turns, the spare slot is restored."""
        found = self._ring_and_spare()
        if found is None:
            return False
        start, spare = found
        waiting, displaced = self.held[start], self.held[spare]
        self._move(spare, waiting)
        slot = start
        while self.target[slot] != waiting:
            (following,) = self.slots_of[self.target[slot]]
            self._move(slot, self.target[slot])
            slot = following
        self._move(slot, waiting, source=spare)
        self._move(spare, displaced)
        return True

    def _ring_and_spare(self) -> tuple[int, int] | None:
        """A slot of a ring and a spare slot, on a device that neither holds its expert nor is where that goes."""
        spares = [slot for slot, expert in enumerate(self.held) if len(self.slots_of[expert]) > 1]
        goal = {self.target[slot]: slot for slot in self.pending}
        for start in sorted(self.pending):
            taken = {self._device(start), self._device(goal[self.held[start]])}
            spare = next((slot for slot in spares if self._device(slot) not in taken), None)
            if spare is not None:
                return start, spare
        return None

    def _move(self, to_slot: int, expert: int, source: int | None = None) -> None:
        from_slot = self._nearest(self.slots_of[expert], to_slot) if source is None else source
        self.moves.append(Move(self.layer, to_slot, expert, from_slot))
        self._set(to_slot, expert)

    def _exchange(self, to_slot: int, from_slot: int) -> None:
        old, expert = self.held[to_slot], self.held[from_slot]
        self.moves.append(Move(self.layer, to_slot, expert, from_slot, is_exchange=True))
        self._set(to_slot, expert)
        self._set(from_slot, old)

    def _set(self, slot: int, expert: int) -> None:
        self.slots_of[self.held[slot]].discard(slot)
        self.held[slot] = expert
        self.slots_of[expert].add(slot)
        if expert == self.target[slot]:
            self.pending.discard(slot)
        else:
            self.pending.add(slot)

    def _nearest(self, slots: set[int], to_slot: int) -> int:
        node = to_slot // self.slots_per_node
        return min(slots, key=lambda slot: (slot // self.slots_per_node != node, slot))

    def _device(self, slot: int) -> int:
        return slot // self.slots_per_device


def _check_comparable(before: ExpertPlacement, after: ExpertPlacement, num_nodes: int) -> None:
    sizes = [(p.num_layers, p.num_slots, p.num_devices, p.num_experts) for p in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"placements differ in (layers, slots, devices, experts): {sizes[0]} and {sizes[1]}")
    if num_nodes < 1 or before.num_devices % num_nodes:
        raise ValueError(f"num_nodes {num_nodes} does not divide {before.num_devices} devices")


def _present(device_experts: np.ndarray, num_experts: int) -> np.ndarray:
    """float32 [l, D, E]: one where the device holds the expert."""
    present = np.zeros((*device_experts.shape[:2], num_experts), np.float32)
    np.put_along_axis(present, device_experts.astype(np.int64), 1, axis=2)
    return present


def _match_devices(shared: np.ndarray, num_nodes: int) -> np.ndarray:
    """[l, D] the device of `after` for each device, from the experts shared by each pair [l, D before, D after]."""
    num_layers, num_devices = shared.shape[:2]
    per_node = num_devices // num_nodes
    blocks = shared.reshape(num_layers, num_nodes, per_node, num_nodes, per_node)
    node_of = _match_greedily(blocks.sum(axis=(2, 4)))  # [l, nodes]
    same_node = blocks.transpose(0, 1, 3, 2, 4)[np.arange(num_layers)[:, None], np.arange(num_nodes), node_of]
    within = _match_greedily(same_node.reshape(-1, per_node, per_node)).reshape(
        num_layers, num_nodes, per_node
    )
    matched = (node_of[:, :, None] * per_node + within).reshape(num_layers, num_devices)
    stay = np.broadcast_to(np.arange(num_devices), matched.shape)
    kept = [
        np.take_along_axis(shared, choice[:, :, None], axis=2).sum(axis=(1, 2)) for choice in (matched, stay)
    ]
    return np.where((kept[0] > kept[1])[:, None], matched, stay)


def _match_greedily(shared: np.ndarray) -> np.ndarray:
    """[b, n]: a column for each row of [b, n, n], the largest entry first."""
    left = shared.copy()
    num_rows = shared.shape[1]
    columns = np.zeros(shared.shape[:2], np.int64)
    batch = np.arange(len(shared))
    for _ in range(num_rows):
        row, column = np.divmod(left.reshape(len(left), -1).argmax(axis=1), num_rows)
        columns[batch, row] = column
        left[batch, row, :] = -1
        left[batch, :, column] = -1
    return columns


def _keep_slots(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """`new` [l, D, K] with each expert that `old` has on the same device in the same slot, the others in order."""
    same = old[:, :, :, None] == new[:, :, None, :]  # [l, D, old slot, new slot]
    is_kept = same.any(axis=3)
    newcomers = np.take_along_axis(new, np.argsort(same.any(axis=2), axis=2, kind="stable"), axis=2)
    turn = np.maximum(np.cumsum(~is_kept, axis=2) - 1, 0)
    return np.where(is_kept, old, np.take_along_axis(newcomers, turn, axis=2))
