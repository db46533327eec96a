"""How the copies of an expert share the rows of a step: by the rows of this very step, inside the compiled step.

Whole numbers throughout, so that every device which has the same counts comes to the same, whatever order it adds in: in
`gather` each device decides for all rows, and a row that two devices see elsewhere would be lost. Shares of rows are in
units of 2 ** -bits rows.

Levelling is the fixed point of `shares._levelled`: each copy moves towards what would bring its device to the mean of the
devices that hold its expert. Few rounds, as each is some small kernels in every layer; what comes out is compared with equal
shares, in whole rows, and never worse for the busiest device.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from runtime.experts.dispatch import plan_dispatch
from runtime.experts.shares import STEP_ROUNDS

MAX_BITS = 10  # of a share's part behind the point
GOLDEN = 0x9E3779B1  # of 2 ** 32: multiples lie evenly, however many there are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CopyTable:
    """slots: the slot of each copy of each expert, in rising order, then -1. place_of_slot: where each slot stands in these,
    e * C + c.

    balance_weight: expert_balance_weight, in [0, 0.5]; 0: copies share equally, 0.5: as levels the devices best.
    """

    slots: Int[Array, "E C"]
    place_of_slot: Int[Array, " P"]
    balance_weight: Float[Array, ""]

    @property
    def has_copies(self) -> bool:
        """Whether any expert can have more than one slot; static."""
        return self.place_of_slot.size > self.slots.shape[0]


def read_table(
    table: Int[Array, " N"], num_experts: int, num_slots: int, balance_weight: Float[Array, ""]
) -> CopyTable:
    """From what `copies.copies_table` makes for a layer."""
    slots, place_of_slot = jnp.split(table, [table.size - num_slots])
    return CopyTable(slots.reshape(num_experts, -1), place_of_slot, balance_weight)


def slots_by_own_rows(
    copies: CopyTable,
    expert_ids: Int[Array, "T k"],
    is_real: Bool[Array, " T"],
    device: Int[Array, ""],
    num_devices: int,
) -> Int[Array, "T k"]:
    """The slot of each pair of this device, shared by what this device's rows want: where nobody knows those of others.

    Padding gets slot P. Each device begins elsewhere, so that what is left over of whole rows does not all fall on one copy.
    """
    num_slots = copies.place_of_slot.size
    if not copies.has_copies:
        return jnp.where(is_real[:, None], copies.slots[expert_ids, 0], num_slots)
    nth, counts = _rank(expert_ids, is_real, copies.slots.shape[0])
    limits = row_limits(
        copies,
        counts,
        num_devices,
        expert_ids.size,
        device.astype(jnp.uint32) * jnp.uint32(2**32 // max(2, num_devices)),
    )
    return jnp.where(is_real[:, None], _slot_of_row(copies, limits, expert_ids, nth), num_slots)


def label_rows(
    copies: CopyTable, expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"]
) -> Int[Array, " N"]:
    """What others have to know of this device's pairs, to know the slots of all: one row of `slots_of_labels`."""
    if not copies.has_copies:
        slots = jnp.where(is_real[:, None], copies.slots[expert_ids, 0], copies.place_of_slot.size)
        return slots.reshape(-1)
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
    device = jnp.arange(len(codes))[:, None]
    is_real = ids < num_experts
    ids = jnp.where(is_real, ids, 0)
    limits = row_limits(copies, jnp.sum(counts, axis=0), len(codes), codes.size, jnp.uint32(0))
    slots = _slot_of_row(copies, limits, ids, nth + before[device, ids])
    return jnp.where(is_real, slots, copies.place_of_slot.size)


def row_limits(
    copies: CopyTable,
    counts: Int[Array, " E"],
    num_devices: int,
    most_rows: int,
    turn: UInt32[Array, ""],
) -> Int[Array, "E C"]:
    """Where each copy's rows end: copy c of an expert takes its rows from limit c - 1 on, up to limit c.

    counts: rows of each expert. most_rows: that there can be. turn: of 2 ** 32, from where fractions of rows are rounded.
    """
    bits = min(MAX_BITS, 30 - most_rows.bit_length())
    is_copy = copies.slots >= 0
    num_copies = jnp.sum(is_copy, axis=1, dtype=jnp.int32)
    total = counts << bits
    equal = jnp.where(is_copy, (total // num_copies)[:, None], 0)
    levelled = _level(copies, equal, total, num_copies, num_devices)
    leaning = (levelled - equal).astype(jnp.float32) * (2 * copies.balance_weight)
    start = jnp.arange(len(counts), dtype=jnp.uint32) * jnp.uint32(GOLDEN) + turn  # by expert, too
    start = (start >> (32 - bits)).astype(jnp.int32)
    is_last = jnp.arange(is_copy.shape[1])[None, :] >= num_copies[:, None] - 1

    def whole(rows: Array) -> Array:
        ends = (jnp.cumsum(rows, axis=1) + start[:, None]) >> bits
        return jnp.where(is_last, counts[:, None], jnp.minimum(ends, counts[:, None]))

    options = [whole(rows) for rows in (equal, equal + leaning.astype(jnp.int32))]
    tops = [jnp.max(_by_device(copies, jnp.diff(ends, axis=1, prepend=0), num_devices)) for ends in options]
    return jnp.where(tops[1] <= tops[0], options[1], options[0])


def _level(
    copies: CopyTable, equal: Array, total: Array, num_copies: Array, num_devices: int
) -> Int[Array, "E C"]:
    """Rows of each copy, in units, that level the devices."""
    is_copy = copies.slots >= 0
    device = jnp.maximum(copies.slots, 0) // (copies.place_of_slot.size // num_devices)
    is_shared = is_copy & (num_copies > 1)[:, None]
    step = jnp.maximum(_by_device(copies, is_shared.astype(jnp.int32), num_devices), 1)[device]
    rows = equal
    for _ in range(STEP_ROUNDS):
        mine = jnp.where(is_copy, _by_device(copies, rows, num_devices)[device], 0)
        aim = jnp.sum(mine, axis=1, keepdims=True) // num_copies[:, None]
        moved = jnp.where(is_copy, jnp.maximum(rows + (aim - mine) // step, 0), 0)
        scale = total.astype(jnp.float32) / jnp.maximum(jnp.sum(moved, axis=1), 1).astype(jnp.float32)
        rows = (moved.astype(jnp.float32) * scale[:, None]).astype(jnp.int32)
    return rows


def _by_device(copies: CopyTable, of_copies: Int[Array, "E C"], num_devices: int) -> Int[Array, " G"]:
    on_slots = of_copies.reshape(-1)[copies.place_of_slot]
    return jnp.sum(on_slots.reshape(num_devices, -1), axis=1)


def _slot_of_row(
    copies: CopyTable, limits: Int[Array, "E C"], ids: Int[Array, "..."], nth: Int[Array, "..."]
) -> Int[Array, "..."]:
    """The slot of an expert's nth row."""
    copy = jnp.sum(nth[..., None] >= limits[ids][..., :-1], axis=-1)
    return copies.slots[ids, copy]


def _rank(
    expert_ids: Int[Array, "T k"], is_real: Bool[Array, " T"], num_experts: int
) -> tuple[Int[Array, "T k"], Int[Array, " E"]]:
    """(the how-manieth of its expert's rows on this device each pair is, rows of each expert)."""
    order = plan_dispatch(expert_ids, is_real, num_experts)
    first = jnp.cumsum(order.group_sizes) - order.group_sizes
    return order.row_of_pair.reshape(expert_ids.shape) - first[expert_ids], order.group_sizes
