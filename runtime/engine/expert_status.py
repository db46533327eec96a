"""What the engine tells of its experts' placement, and what an operator may order. Frozen; imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_PINNED = 4096


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """A rung measured whole and as two micro-batches, in seconds of a step, and which form serves.

    source: where the seconds are from, "warm-up" or "traffic". reason: `runtime.adaptive.form_judge.FormReason` of the last
    verdict. trigger: why that was asked for, num_groups: how many comparisons it rests on; both of traffic only.
    is_contested: the forms take turns now; not while a contest waits for launches.
    """

    rung: str
    whole_s: float
    halves_s: float
    is_in_halves: bool
    source: str = "warm-up"
    reason: str = ""
    trigger: str | None = None
    num_groups: int = 0
    is_contested: bool = False


@dataclass(frozen=True, slots=True)
class ForecastStatus:
    """Where the forecast of the experts' loads comes from (`runtime.experts.load_predictor`).

    source: who made it. errors: each source's error of late, a distance in [0, 1]. next_traffic: shares of traffic keys in the
    next window, as foreseen from what runs and waits; empty where no request says its key.
    """

    source: str
    errors: Mapping[str, float]
    next_traffic: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ExpertStatus:
    """slot_experts: the expert in each physical slot, by layer; slots lie on devices in order.

    device_rows: rows that each device's experts computed since the start, by layer. imbalance: (max - mean) / mean over
    devices of the last window's rows, mean over layers; None before the first. waiting_moves: ordered, not yet applied.
    reason: why experts move or do not (docs/expert_parallel.md). alarm: a sentence while a plan is overdue.
    overlap: rungs that were measured in both forms. forecast: None before the first window.
    """

    num_devices: int
    slots_per_device: int
    slot_experts: tuple[tuple[int, ...], ...]
    device_rows: tuple[tuple[int, ...], ...]
    imbalance: float | None
    waiting_moves: int
    applied_moves: int
    is_paused: bool
    pinned_layers: tuple[int, ...]
    reason: str
    alarm: str | None
    overlap: tuple[OverlapChoice, ...] = ()
    forecast: ForecastStatus | None = None


@dataclass(frozen=True, slots=True)
class ResidencyStatus:
    """Which experts lie in the device's memory, and what that was worth since the start, in num_steps steps.

    By layer of `layers` (those that have experts): slot_experts, the expert in each slot, -1 for a free one; layer_rows and
    layer_asleep_rows, rows of all experts and of those that were asleep; hit_rates, share of rows whose expert was resident,
    None before the first. late_fetches: copies that a layer waited for; prefetches: copies made one layer ahead, used or in
    vain. changes: by reason (`runtime.experts.residency`).
    """

    num_slots: int
    num_experts: int
    num_resident: int
    slot_experts: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    num_steps: int
    layer_rows: tuple[int, ...]
    layer_asleep_rows: tuple[int, ...]
    hit_rates: tuple[float | None, ...]
    resident_rows: int
    asleep_rows: int
    late_fetches: int
    prefetches_used: int
    prefetches_unused: int
    changes: Mapping[str, int]
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """What an operator wants: what is None stays as it is.

    rebalance: "plan" shows a full rebalance, "apply" carries it out.
    """

    rebalance: str | None = None
    is_paused: bool | None = None
    pinned_layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExpertAnswer:
    """The status after the order and, where a rebalance was asked for, its plan."""

    status: ExpertStatus
    num_moves: int | None = None
    moves_by_layer: tuple[int, ...] | None = None
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    saved_rows: float | None = None  # off the heaviest devices, summed over layers, a step
    cost_s: float | None = None
    saving_s: float | None = None  # over the plan's life
