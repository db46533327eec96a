"""How the copies of an expert share the rows of a step: by the rows of this very step, inside the compiled step.

Sums are of whole numbers, so that every device which has the same counts comes to the same, whatever order it adds in: in
`gather` each device decides for all rows, and a row that two devices see elsewhere would be lost. Shares of rows are in
units of 2 ** -bits rows; only scaling by element is float32, in operations that round alike on devices of
one kind, which all hosts must have (`engine/device_kind.py`).

Levelling is the fixed point of `shares._levelled`: each copy moves towards what would bring its device to the mean of the
devices that hold its expert. Few rounds, as each is some small kernels in every layer; what comes out is compared with equal
shares, in whole rows, and never worse for the busiest device (of the rows that are known: all, or a device's own).
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from runtime.experts.dispatch import plan_dispatch
from runtime.experts.shares import STEP_ROUNDS

MAX_BITS = 10  # of a share's part behind the point
MIXER = 0x85EBCA6B  # odd, of 2 ** 32: sums that differ little give turns that differ much
GOLDEN = 0x9E3779B1  # of 2 ** 32: multiples lie evenly, however many there are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CopyTable:
    """slots: the slot that each device has for each expert, of all devices; -1 where it has none (`copies.copies_table`).

    balance_weight: expert_balance_weight, in [0, 0.5]; 0: copies share equally, 0.5: as levels the devices best.
    num_slots: P, of all devices; static.
    """

    slots: Int[Array, "E G"]
    balance_weight: Float[Array, ""]
    num_slots: int = field(metadata={"static": True})

    @property
    def has_copies(self) -> bool:
        """Whether any expert can have more than one slot; static."""
        return self.num_slots > self.slots.shape[0]


def slots_by_own_rows(
    copies: CopyTable, expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"], device: Int[Array, ""]
) -> Int[Array, "T k"]:
    """The slot of each pair of this device, shared by what this device's rows want: where nobody knows those of others.

    Padding gets slot P. Each device begins elsewhere, so that what is left over of whole rows does not all fall on one copy.
    """
    if not copies.has_copies:
        return _only_slot(copies, expert_ids, is_real)
    num_experts, num_devices = copies.slots.shape
    nth, counts = _rank(expert_ids, is_real, num_experts)
    turn = device.astype(jnp.uint32) * jnp.uint32(2**32 // max(2, num_devices))
    ends = row_ends(copies, counts, expert_ids.size, turn + _turn_of(counts))
    return jnp.where(is_real[:, None], _slot_of_row(copies, ends, expert_ids, nth), copies.num_slots)


def label_rows(
    copies: CopyTable, expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"]
) -> Int[Array, " N"]:
    """What others have to know of this device's pairs, to know the slots of all: one row of `slots_of_labels`."""
    if not copies.has_copies:
        return _only_slot(copies, expert_ids, is_real).reshape(-1)
    num_experts = copies.slots.shape[0]
    nth, counts = _rank(expert_ids, is_real, num_experts)
    codes = nth * (num_experts + 1) + jnp.where(is_real[:, None], expert_ids, num_experts)
    return jnp.concatenate([codes.reshape(-1), counts])


def slots_of_labels(copies: CopyTable, labels: Int[Array, "G N"], num_pairs: int) -> Int[Array, "G N"]:
    """The slot of every pair of all devices, shared by the rows of all; P for padding. num_pairs: of one device."""
    if not copies.has_copies:
        return labels
    num_experts = copies.slots.shape[0]
    codes, counts = labels[:, :num_pairs], labels[:, num_pairs:]
    ids, nth = codes % (num_experts + 1), codes // (num_experts + 1)
    before = jnp.cumsum(counts, axis=0) - counts  # [G, E]: rows of the devices ahead
    is_real = ids < num_experts
    ids = jnp.where(is_real, ids, 0)
    total = jnp.sum(counts, axis=0)
    ends = row_ends(copies, total, codes.size, _turn_of(total))
    slots = _slot_of_row(copies, ends, ids, nth + jnp.take_along_axis(before, ids, axis=1))
    return jnp.where(is_real, slots, copies.num_slots)


def row_ends(
    copies: CopyTable, counts: Int[Array, " E"], most_rows: int, turn: UInt32[Array, ""]
) -> Int[Array, "E G"]:
    """Where each device's rows of an expert end: device g takes those from the end of device g - 1 on, up to its own.

    counts: rows of each expert. most_rows: that there can be. turn: of 2 ** 32, from where fractions of rows are rounded.
    """
    bits = min(MAX_BITS, 30 - most_rows.bit_length())
    is_copy, devices = copies.slots >= 0, jnp.arange(copies.slots.shape[1])[None, :]
    counts = counts[:, None]
    num_copies = jnp.sum(is_copy, axis=1, keepdims=True, dtype=jnp.int32)
    last = jnp.max(jnp.where(is_copy, devices, 0), axis=1, keepdims=True)
    total = counts << bits
    equal = jnp.where(is_copy, total // num_copies, 0)
    leaning = (_level(is_copy, equal, total, num_copies) - equal).astype(jnp.float32)
    leaning = equal + (leaning * (2 * copies.balance_weight)).astype(jnp.int32)
    start = jnp.arange(len(counts), dtype=jnp.uint32) * jnp.uint32(GOLDEN) + turn  # by expert, too
    start = (start >> (32 - bits)).astype(jnp.int32)[:, None]

    def whole(rows: Array) -> tuple[Array, Array]:
        """Ends in whole rows, and the rows of the busiest device."""
        so_far = jnp.sum(jnp.where(devices <= devices.T, rows[:, None, :], 0), axis=2)  # cumsum: many kernels
        ends = jnp.where(devices >= last, counts, jnp.minimum((so_far + start) >> bits, counts))
        return ends, jnp.max(jnp.sum(jnp.diff(ends, axis=1, prepend=0), axis=0))

    (equally, most_equally), (level, most_level) = whole(equal), whole(leaning)
    return jnp.where(most_level <= most_equally, level, equally)


def _level(
    is_copy: Bool[Array, "E G"],
    equal: Int[Array, "E G"],
    total: Int[Array, "E 1"],
    num_copies: Int[Array, "E 1"],
) -> Int[Array, "E G"]:
    """Rows of each copy, in units, that level the devices."""
    is_shared = is_copy & (num_copies > 1)
    step = jnp.maximum(jnp.sum(is_shared, axis=0, keepdims=True, dtype=jnp.int32), 1)
    rows = equal
    for _ in range(STEP_ROUNDS):
        by_device = jnp.sum(rows, axis=0, keepdims=True)
        aim = jnp.sum(jnp.where(is_copy, by_device, 0), axis=1, keepdims=True) // num_copies
        moved = jnp.where(is_copy, jnp.maximum(rows + (aim - by_device) // step, 0), 0)
        left = jnp.maximum(jnp.sum(moved, axis=1, keepdims=True), 1)
        scale = total.astype(jnp.float32) / left.astype(jnp.float32)
        rows = (moved.astype(jnp.float32) * scale).astype(jnp.int32)
    return rows


def _turn_of(counts: Int[Array, " E"]) -> UInt32[Array, ""]:
    """Another one in each layer and step, the same on all devices, or the odd row of an expert would always go to one copy."""
    odd = 2 * jnp.arange(len(counts), dtype=jnp.uint32) + 1
    return jnp.sum(counts.astype(jnp.uint32) * odd) * jnp.uint32(MIXER)


def _slot_of_row(
    copies: CopyTable, ends: Int[Array, "E G"], ids: Int[Array, "N k"], nth: Int[Array, "N k"]
) -> Int[Array, "N k"]:
    """The slot of an expert's nth row."""
    device = jnp.sum(nth[..., None] >= ends[ids][..., :-1], axis=-1)
    return copies.slots[ids, device]


def _only_slot(copies: CopyTable, ids: Int[Array, "T k"], is_real: Bool[Array, " T"]) -> Int[Array, "T k"]:
    slot = jnp.max(copies.slots, axis=1)
    return jnp.where(is_real[:, None], slot[ids], copies.num_slots)


def _rank(
    expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"], num_experts: int
) -> tuple[Int[Array, "T k"], Int[Array, " E"]]:
    """(the how-manieth of its expert's rows on this device each pair is, rows of each expert)."""
    order = plan_dispatch(expert_ids, is_real, num_experts)
    first = jnp.cumsum(order.group_sizes) - order.group_sizes
    return order.row_of_pair.reshape(expert_ids.shape) - first[expert_ids], order.group_sizes
