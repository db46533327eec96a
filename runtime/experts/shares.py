"""Which part of an expert's tokens each copy takes, as the host foresees it for plans and benchmarks.

All copies of an expert are the same weights, so any shares give the same output; this is what `expert_balance_weight`
moves. What serves is decided in the step itself, by its own rows: `sharing.py`. Leaning between different experts changes the
output: `lean_between_experts`, for those who set `expert_lean_between`.
"""

import numpy as np

from runtime.experts.placement import ExpertPlacement

LEVELLING_ROUNDS = 16
STEP_ROUNDS = 4  # of a step, which does it in every layer


def device_loads(
    placement: ExpertPlacement, loads: np.ndarray, shares: np.ndarray | None = None
) -> np.ndarray:
    """[L, D]: the load of each device for expert loads [L, E]; slot shares [L, S] default to equal ones."""
    shares = equal_shares(placement) if shares is None else shares
    on_slots = np.take_along_axis(loads, placement.slot_experts, axis=1) * shares
    return on_slots.reshape(placement.num_layers, placement.num_devices, -1).sum(axis=2)


def imbalance(device_loads: np.ndarray) -> np.ndarray:
    """[L]: (max - mean) / mean over devices [L, D]; 0 for a layer without load."""
    mean = device_loads.mean(axis=1)
    return np.divide(device_loads.max(axis=1) - mean, mean, out=np.zeros_like(mean), where=mean > 0)


def equal_shares(placement: ExpertPlacement) -> np.ndarray:
    """float64 [L, S]: one over the number of copies."""
    return 1 / np.take_along_axis(placement.copies, placement.slot_experts, axis=1)


def slot_shares(
    placement: ExpertPlacement, loads: np.ndarray, weight: float, rounds: int = LEVELLING_ROUNDS
) -> np.ndarray:
    """float64 [L, S]: the part of its expert's tokens that each slot takes; the slots of an expert add up to one.

    weight: expert_balance_weight, 0 equal shares, 0.5 what levels the devices best, linear in between. rounds: STEP_ROUNDS with
    the loads of one step are its shares, but for whole rows.
    """
    if not 0 <= weight <= 0.5:
        raise ValueError(f"expert_balance_weight must be in [0, 0.5], not {weight}")
    equal = equal_shares(placement)
    if weight == 0:
        return equal
    return equal + 2 * weight * (_levelled(placement, loads, equal, rounds) - equal)


def lean_between_experts(placement: ExpertPlacement, loads: np.ndarray, weight: float) -> np.ndarray:
    """float32 [L, E], to be added to the scores that experts are chosen by: up to -weight where devices are busiest.

    Scores are what the router makes of its logits, in [0, 1]; the weights of the chosen experts' outputs stay as they were.
    Lossy: tokens go to experts that the router would not have chosen. docs/experts.md has what it costs.
    """
    if not 0 <= weight <= 0.5:
        raise ValueError(f"expert_lean_between must be in [0, 0.5], not {weight}")
    by_device = device_loads(placement, loads)
    mean = by_device.mean(axis=1, keepdims=True)
    excess = np.clip(np.divide(by_device, mean, out=np.ones_like(by_device), where=mean > 0) - 1, -1, 1)
    on_slots = np.repeat(excess, placement.slots_per_device, axis=1) * equal_shares(placement)
    bias = np.zeros(loads.shape)
    np.add.at(bias, (np.arange(len(loads))[:, None], placement.slot_experts), on_slots)
    return (-weight * bias).astype(np.float32)


def _levelled(placement: ExpertPlacement, loads: np.ndarray, equal: np.ndarray, rounds: int) -> np.ndarray:
    """Shares [L, S] that level the devices: each copy moves towards what would bring its device to the mean of the
    devices that hold its expert. The best of the rounds is kept, so it is never worse than equal shares."""
    num_layers, num_devices = placement.num_layers, placement.num_devices
    layer, slot = np.nonzero(equal < 1)
    if not len(layer):
        return equal
    expert = layer * placement.num_experts + placement.slot_experts[layer, slot]
    _, expert = np.unique(expert, return_inverse=True)
    device = layer * num_devices + slot // placement.slots_per_device
    num_copies = np.bincount(expert)
    total = loads[layer, placement.slot_experts[layer, slot]]
    moving = total * equal[layer, slot]
    all_devices = device_loads(placement, loads, equal).ravel()
    fixed = all_devices - np.bincount(device, moving, minlength=all_devices.size)
    step = 1 / np.bincount(device, minlength=all_devices.size)[device]
    best, best_top = moving, all_devices.reshape(num_layers, -1).max(axis=1)
    for turn in range(rounds + 1):
        by_device = fixed + np.bincount(device, moving, minlength=all_devices.size)
        top = by_device.reshape(num_layers, -1).max(axis=1)
        is_best = top < best_top
        best, best_top = np.where(is_best[layer], moving, best), np.minimum(top, best_top)
        if turn == rounds:
            break
        mine = by_device[device]
        aim = (np.bincount(expert, mine) / num_copies)[expert]
        moving = np.maximum(moving + step * (aim - mine), 0)
        scale = total / np.maximum(np.bincount(expert, moving)[expert], 1e-300)
        moving = moving * scale
    shares = equal.copy()
    is_loaded = total > 0
    shares[layer[is_loaded], slot[is_loaded]] = (best[is_loaded] / total[is_loaded]).clip(0, 1)
    return shares
