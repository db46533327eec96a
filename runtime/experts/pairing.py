"""How many copies each expert gets where a device has two slots: then packing is pairing, and a copy's partner counts.

`choose_copies` makes the highest load per copy low, as if a copy were alone on its device. With two slots the heaviest copy
has the lightest for a partner, the second heaviest the second lightest (no other pairing has a lower heaviest pair), so
what counts is the heaviest pair. A spare slot lowers it in two ways: a further copy of the heavy expert, or a further copy
of a cold one, which makes two light partners out of one expert.

A limit for the heaviest pair is searched by bisection. Within a limit every expert first gets as many copies as it needs to be
alone on their devices; the slots left then go, one by one, where they take most off the pairs above the limit. Rows b are
layers, or layers times nodes.
"""

import numpy as np

LIMITS = 4  # tries a layer; more found nothing better
CLOSE_ENOUGH = 2e-3  # part of the limit; sampling noise is many times that
ROUNDING = 1e-9  # a load of exactly twice the limit takes two copies


def choose_copies_in_pairs(loads: np.ndarray, copies: np.ndarray, num_devices: int) -> np.ndarray:
    """int64 [b, E]: copies for num_devices pairs, from `copies` [b, E], which fill all slots; never worse than these.

    loads: float [b, E], above zero somewhere in every row.
    """
    best = copies.copy()
    high = _pairs(loads, copies, num_devices).max(axis=1)
    low = np.maximum(loads.sum(axis=1) / num_devices, (loads / copies).max(axis=1))
    for _ in range(LIMITS):
        at = np.flatnonzero(high > low * (1 + CLOSE_ENOUGH))
        if not len(at):
            break
        limit = (low[at] + high[at]) / 2
        tried, top = _fit(loads[at], limit, num_devices)
        is_better = top < high[at]
        better = at[is_better]
        best[better], high[better] = tried[is_better], top[is_better]
        low[at] = np.where(top > limit, limit, low[at])
    return best


def _fit(loads: np.ndarray, limit: np.ndarray, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """(copies, the heaviest pair [b]) when a limit [b] is aimed at; infinite where experts alone need too many slots."""
    needed = np.maximum(np.ceil(loads / limit[:, None] - ROUNDING), 1)
    num_left = 2 * num_devices - needed.sum(axis=1)
    tops = np.full(len(loads), np.inf)
    at = np.flatnonzero((num_left >= 0) & (needed.max(axis=1) <= num_devices))
    copies = needed.astype(np.int64)
    while True:
        done = at[num_left[at] == 0]
        tops[done] = _pairs(loads[done], copies[done], num_devices).max(axis=1)
        at = at[num_left[at] > 0]
        if not len(at):
            return copies, tops
        takers = _takers(loads[at], copies[at], num_devices)
        copies[at, _best_taker(loads[at], copies[at], takers, limit[at], num_devices)] += 1
        num_left[at] -= 1


def _takers(loads: np.ndarray, copies: np.ndarray, num_devices: int) -> np.ndarray:
    """int64 [b, 3], experts that may take a spare slot: the heavy one of the heaviest pair; the coldest that has one copy;
    the warmest that has one copy and makes two partners as light as the coldest, which spares that one too."""
    per_copy = loads / copies
    order = np.argsort(-per_copy, axis=1, kind="stable")
    heaviest = _pairs(loads, copies, num_devices).argmax(axis=1)
    first_beyond = np.cumsum(
        np.take_along_axis(copies, order, axis=1), axis=1
    )  # place after an expert's last copy
    place = (first_beyond <= heaviest[:, None]).sum(axis=1)
    heavy = order[np.arange(len(order)), place]
    single = np.where(copies == 1, loads, np.inf)
    coldest = single.argmin(axis=1)
    is_light = single <= 2 * single.min(axis=1, keepdims=True)
    halved = np.where(is_light & (copies == 1), loads, -1).argmax(axis=1)
    return np.stack([heavy, coldest, halved], axis=1)


def _best_taker(
    loads: np.ndarray, copies: np.ndarray, takers: np.ndarray, limit: np.ndarray, num_devices: int
) -> np.ndarray:
    """int64 [b]: the taker after which least is above the limit, summed over pairs; of equals the one with the lower top."""
    num_rows, num_takers = takers.shape
    after = np.repeat(copies, num_takers, axis=0)
    after[np.arange(len(after)), takers.ravel()] += 1
    pairs = _pairs(np.repeat(loads, num_takers, axis=0), after, num_devices).reshape(num_rows, num_takers, -1)
    over = np.maximum(pairs - limit[:, None, None], 0).sum(axis=2) + 1e-3 * pairs.max(axis=2)
    over[np.take_along_axis(copies, takers, axis=1) >= num_devices] = np.inf
    return takers[np.arange(num_rows), over.argmin(axis=1)]


def _pairs(loads: np.ndarray, copies: np.ndarray, num_devices: int) -> np.ndarray:
    """float64 [b, num_devices]: the loads of the pairs, by falling load of the heavier one; slots left over weigh nothing."""
    empty = 2 * num_devices - copies.sum(axis=1, keepdims=True)
    counts = np.concatenate([copies, empty], axis=1)
    per_copy = np.concatenate([loads / copies, np.zeros((len(loads), 1))], axis=1)
    slots = np.sort(np.repeat(per_copy.ravel(), counts.ravel()).reshape(len(loads), 2 * num_devices), axis=1)
    return slots[:, : num_devices - 1 : -1] + slots[:, :num_devices]
