"""144 devices of two slots: how good a plan is on the loads that it was made from, and what can be reached on a later window.

A placement that is made without seeing the judged window has loads there whose mean is what it has under the true rates. The
mean of a maximum is not below the maximum of the means, so on average no such placement with equal shares is better on the
window than the bound of the rates: `least_without_foresight`. Imports no JAX.
"""

from typing import Any

import numpy as np

from runtime.bench.expert_bound import lowest_pair
from runtime.bench.expert_loads import SYNTHETIC_EXPERTS
from runtime.bench.expert_replay import steady_traffic
from runtime.experts.balancer import SlotShape, balance
from runtime.experts.shares import device_loads

NUM_LAYERS = 8  # of each seed: the bound is an optimisation of its own for every layer


def pair_quality(num_devices: int, num_seeds: int, num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Load of the heaviest device over the mean, means over the first layers of every seed."""
    shape = SlotShape(SYNTHETIC_EXPERTS, num_devices, 2)
    rows: list[np.ndarray] = []
    for seed in range(num_seeds):
        traffic = steady_traffic(seed)
        seen, rates = traffic.prediction.loads[:num_layers], traffic.rates[:num_layers]
        window = traffic.window[:num_layers]
        plan, of_rates = balance(seen, shape), balance(rates, shape)
        rows.append(
            np.array(
                [
                    _top(device_loads(plan, seen)),
                    lowest_pair(seen, num_devices) * num_devices / seen.sum(axis=1),
                    _top(device_loads(plan, window)),
                    _top(device_loads(of_rates, window)),
                    lowest_pair(window, num_devices) * num_devices / window.sum(axis=1),
                ]
            )
        )
    plan_own, bound_own, plan_next, rates_next, bound_next = (
        np.concatenate(rows, axis=1).mean(axis=1).tolist()
    )
    one = steady_traffic(0).rates[:1]  # all layers have the same rates in another order
    least = float(lowest_pair(one, num_devices)[0] * num_devices / one.sum())
    return {
        "devices": num_devices,
        "slots_per_device": 2,
        "layers": num_layers * num_seeds,
        "own_loads": {
            "plan": round(plan_own, 4),
            "bound": round(bound_own, 4),
            "plan_above_bound": round(plan_own / bound_own - 1, 4),
        },
        "next_window": {
            "plan": round(plan_next, 4),
            "true_rates": round(rates_next, 4),
            "bound": round(bound_next, 4),
            "least_without_foresight": round(least, 4),
            "plan_above_true_rates": round(plan_next / rates_next - 1, 4),
            "plan_above_bound": round(plan_next / bound_next - 1, 4),
            "least_above_bound": round(least / bound_next - 1, 4),
        },
    }


def _top(by_device: np.ndarray) -> np.ndarray:
    """float64 [L]: the heaviest device over the mean."""
    return by_device.max(axis=1) / by_device.mean(axis=1)
