"""Which physical slot holds which expert, and the order of moves from one placement to another.

A slot is a fixed place for one expert's weights in one layer; slot s lives on device s // slots_per_device. The step
reads the slot table as an argument, so a move is a copy of weights and one number in this table, never a compile.
An expert with more slots than one has copies, which share its tokens. `moves.py` orders the moves between two placements.
Knows nothing of loads: `balancer.py` decides.

With 3 experts on 2 devices of 2 slots, one layer, expert 0 copied:

    slot_experts  [[0, 1, 2, 0]]        copies  [[2, 1, 1]]        expert_slots  [[[0, 3], [1, -1], [2, -1]]]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """slot_experts: int32 [L, S], the logical expert in each physical slot; a read-only copy is kept.

    ValueError if a number does not fit, an expert has no slot, or two copies of an expert share a device.
    """

    slot_experts: np.ndarray
    num_devices: int
    num_experts: int

    def __post_init__(self) -> None:
        given = np.asarray(self.slot_experts)
        if given.ndim != 2 or given.dtype.kind not in "iu":
            raise ValueError(f"slot_experts must be integers [L, S], not {given.dtype} {list(given.shape)}")
        num_slots = given.shape[1]
        if self.num_devices < 1 or num_slots == 0 or num_slots % self.num_devices:
            raise ValueError(f"{num_slots} slots do not divide over num_devices {self.num_devices}")
        if given.size and not (given.min() >= 0 and given.max() < self.num_experts):
            raise ValueError(
                f"slot_experts must lie in [0, {self.num_experts}), not [{given.min()}, {given.max()}]"
            )
        slot_experts = given.astype(np.int32)  # a copy
        slot_experts.flags.writeable = False
        object.__setattr__(self, "slot_experts", slot_experts)
        self._check_copies()

    def _check_copies(self) -> None:
        missing = np.argwhere(self.copies == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(
                f"layer {layer}: expert {expert} has no slot ({len(missing)} such experts in all layers)"
            )
        by_device = np.sort(self.device_experts, axis=-1)
        twice = np.argwhere(by_device[..., 1:] == by_device[..., :-1])
        if len(twice):
            layer, device, place = twice[0]
            expert = by_device[layer, device, place]
            raise ValueError(f"layer {layer}: device {device} holds expert {expert} in two slots")

    @classmethod
    def uniform(
        cls, num_layers: int, num_experts: int, num_devices: int, slots_per_device: int
    ) -> "ExpertPlacement":
        """The placement to start from: experts in order over the devices, spare slots copy the other devices' experts.

        Balanced when all experts are equally loaded and num_experts divides over the devices.
        """
        if not 1 <= slots_per_device <= num_experts:
            raise ValueError(
                f"slots_per_device must be in [1, {num_experts}], the number of experts, not {slots_per_device}: "
                "two copies of one expert on a device are of no use"
            )
        if num_devices < 1 or num_devices * slots_per_device < num_experts:
            raise ValueError(
                f"num_devices {num_devices} x slots_per_device {slots_per_device} cannot hold {num_experts} experts"
            )
        own = np.array_split(np.arange(num_experts), num_devices)
        row = np.concatenate([_start_device(own, device, slots_per_device) for device in range(num_devices)])
        return cls(np.tile(row, (num_layers, 1)), num_devices, num_experts)

    @property
    def num_layers(self) -> int:
        return self.slot_experts.shape[0]

    @property
    def num_slots(self) -> int:
        return self.slot_experts.shape[1]

    @property
    def slots_per_device(self) -> int:
        return self.num_slots // self.num_devices

    @property
    def max_copies(self) -> int:
        """C, the most copies an expert can ever have here; follows from the shape, so moves never change it."""
        return min(self.num_devices, self.num_slots - self.num_experts + 1)

    @property
    def device_experts(self) -> np.ndarray:
        """int32 [L, devices, slots_per_device]: the same table by device."""
        return self.slot_experts.reshape(self.num_layers, self.num_devices, self.slots_per_device)

    @cached_property
    def copies(self) -> np.ndarray:
        """int32 [L, E]: the slots of each expert."""
        keys = self.slot_experts + self.num_experts * np.arange(self.num_layers, dtype=np.int32)[:, None]
        counts = np.bincount(keys.ravel(), minlength=self.num_layers * self.num_experts)
        return _read_only(counts.astype(np.int32).reshape(self.num_layers, self.num_experts))

    @cached_property
    def expert_slots(self) -> np.ndarray:
        """int32 [L, E, C]: the slots of each expert in rising order, then -1."""
        return _read_only(self.by_copy(np.arange(self.num_slots, dtype=np.int32), fill=-1))

    def by_copy(self, values: np.ndarray, fill: float = 0) -> np.ndarray:
        """[L, E, C]: values of slots, [L, S] or [S], for each expert's copies in rising order of slots, then `fill`."""
        order, experts, place = self._slots_by_expert
        slot_values = np.broadcast_to(values, order.shape)
        table = np.full((self.num_layers, self.num_experts, self.max_copies), fill, slot_values.dtype)
        table[np.arange(self.num_layers)[:, None], experts, place] = np.take_along_axis(
            slot_values, order, axis=1
        )
        return table

    @cached_property
    def _slots_by_expert(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[L, S] each: slots sorted by expert, their experts, and the how-manieth copy of its expert each is."""
        order = np.argsort(self.slot_experts, axis=1, kind="stable")
        experts = np.take_along_axis(self.slot_experts, order, axis=1)
        first = np.cumsum(self.copies, axis=1) - self.copies  # [L, E]
        return order, experts, np.arange(self.num_slots) - np.take_along_axis(first, experts, axis=1)

    def with_layers(self, rows: Mapping[int, np.ndarray]) -> "ExpertPlacement":
        """With other layers, int [S] each, which must be valid as `moved` gives them: nothing is checked here."""
        slot_experts = self.slot_experts.copy()
        for layer, row in rows.items():
            slot_experts[layer] = row
        return self._unchecked(slot_experts)

    def only(self, layers: Sequence[int]) -> "ExpertPlacement":
        """These layers, in this order."""
        return self._unchecked(self.slot_experts[list(layers)])

    def _unchecked(self, slot_experts: np.ndarray) -> "ExpertPlacement":
        """On the same devices, with a table that is known to be valid and nobody else's: checks take longer than a move."""
        made = object.__new__(ExpertPlacement)
        for name, value in (
            ("slot_experts", _read_only(slot_experts)),
            ("num_devices", self.num_devices),
            ("num_experts", self.num_experts),
        ):
            object.__setattr__(made, name, value)
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        same = (self.num_devices, self.num_experts) == (other.num_devices, other.num_experts)
        return same and np.array_equal(self.slot_experts, other.slot_experts)

    def __hash__(self) -> int:
        return hash((self.num_devices, self.num_experts, self.slot_experts.tobytes()))


@dataclass(frozen=True)
class Move:
    """Copy `expert`'s weights of `layer` from `from_slot` over `to_slot`.

    is_exchange: the two slots swap their weights at once (from_slot gets what to_slot held). Only needed where no
    expert of the layer has a copy to spare.
    """

    layer: int
    to_slot: int
    expert: int
    from_slot: int
    is_exchange: bool = False


def apply(placement: ExpertPlacement, move: Move) -> ExpertPlacement:
    """The placement after the move. ValueError if serving could not go on while or after it is made."""
    return placement.with_layers({move.layer: moved(placement, move)})


def moved(placement: ExpertPlacement, move: Move, by_now: np.ndarray | None = None) -> np.ndarray:
    """int32 [S], the move's layer after it; by_now: what the layer holds before it, where that is not the placement's.

    Only what the move touches is looked at. ValueError if serving could not go on while or after it is made.
    """
    row: np.ndarray = placement.slot_experts[move.layer] if by_now is None else by_now
    if not (0 <= move.to_slot < len(row) and 0 <= move.from_slot < len(row)):
        raise ValueError(f"{move}: slots are 0 to {len(row) - 1}")
    old = int(row[move.to_slot])
    if row[move.from_slot] != move.expert:
        raise ValueError(f"{move}: from_slot holds expert {row[move.from_slot]}")
    if not move.is_exchange and np.count_nonzero(row == old) < 2:
        raise ValueError(f"{move}: to_slot holds the only copy of expert {old}")
    row = row.copy()
    row[move.to_slot] = move.expert
    written = {move.to_slot: move.expert}
    if move.is_exchange:
        row[move.from_slot] = old
        written[move.from_slot] = old
    for slot, expert in written.items():
        device, width = slot // placement.slots_per_device, placement.slots_per_device
        if np.count_nonzero(row[device * width : (device + 1) * width] == expert) > 1:
            raise ValueError(f"{move}: after it device {device} holds expert {expert} in two slots")
    return row


def _start_device(own: list[np.ndarray], device: int, num_slots: int) -> np.ndarray:
    """The experts of one device in the uniform placement: its own, then others taken in turn, never one twice."""
    num_devices, widest = len(own), max(map(len, own))
    experts = list(own[device])
    turn = 0
    while len(experts) < num_slots:
        lap, other = divmod(turn, max(1, num_devices - 1))
        theirs = own[(device + 1 + other) % num_devices]
        place = (lap + other) % widest  # a different expert of each device, so that none gets all the copies
        if place < len(theirs):
            experts.append(theirs[place])
        turn += 1
    return np.array(experts[:num_slots])


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
