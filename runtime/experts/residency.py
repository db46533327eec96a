"""Residency: which experts of each layer hold a slot on the device, and when that changes. Imports no JAX.

A slot is worth what it saves: one fetch in every step that wants its expert, however many rows do. So an expert's score
counts the steps that wanted it, and each count halves in `half_life_steps`: LRFU (Lee and others, "LRFU: a spectrum of
policies", IEEE Transactions on Computers, 2001), which is LRU for a short half-life and LFU for an endless one. Where steps
are so large that all experts are wanted in each, rows decide: a launch adds up to one more for its busiest expert, others
in proportion. Nothing is hot by decree: scores come from traffic alone and fade with it.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

HALF_LIFE_STEPS = 16.0
LONGEST_GAP_S = 1.0  # between two launches of one stretch of traffic; what is longer was a pause


class AsleepColumn(IntEnum):
    """What a step counts, by layer, of experts that were not resident."""

    ROWS = 0  # rows of such experts
    STAGED_USED = 1  # fetched ahead, and wanted
    STAGED_UNUSED = 2  # fetched ahead in vain
    LATE = 3  # fetched when the layer wanted them


class ResidencyReason(StrEnum):
    """Why residency changed, or did not."""

    WOKE = "woke"  # into a free slot
    EVICTED = "evicted"  # an expert fell asleep for another, which woke
    SLEPT = "slept"  # no traffic: the slot is free
    KEPT_BY_HYSTERESIS = "kept_by_hysteresis"  # an asleep expert was ahead of a resident one, by too little


@dataclass(frozen=True)
class ResidencySettings:
    """sleep_after_s: seconds of traffic, pauses left out, after which an unused expert loses its slot.

    max_swaps: weights copied by one decision. wake_margin: by how much of its victim's score an asleep expert must be ahead of
    it. Raises ValueError.
    """

    sleep_after_s: float = 600.0
    max_swaps: int = 4
    wake_margin: float = 0.1

    def __post_init__(self) -> None:
        if not self.sleep_after_s > 0 or self.max_swaps < 0 or not self.wake_margin >= 0:
            raise ValueError(f"{self}: expected sleep_after_s > 0, max_swaps >= 0, wake_margin >= 0")


@dataclass(frozen=True)
class Wake:
    """Copy `expert` of `layer` from the host's memory into `slot`; `evicted` held it until now, or nobody did."""

    layer: int
    slot: int
    expert: int
    evicted: int | None = None


@dataclass(frozen=True)
class ResidencyChange:
    """One decision. slept: (layer, expert) of freed slots. num_kept: layers where the margin kept things as they are."""

    wakes: tuple[Wake, ...] = ()
    slept: tuple[tuple[int, int], ...] = ()
    num_kept: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose table changed."""
        return tuple(sorted({w.layer for w in self.wakes} | {layer for layer, _ in self.slept}))


class Residency:
    """Slots and scores of all layers. At the start slot s holds expert s, because something must."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        *,
        start_s: float,
        half_life_steps: float = HALF_LIFE_STEPS,
    ) -> None:
        """Raises ValueError for other than 1 to num_experts slots, or a half-life that is not positive."""
        if not 1 <= num_slots <= num_experts or not half_life_steps > 0:
            raise ValueError(
                f"{num_slots} slots for {num_experts} experts with a half-life of {half_life_steps} steps: "
                "slots must be 1 to the number of experts, the half-life above 0"
            )
        self.expert_of_slot = np.tile(np.arange(num_slots, dtype=np.int32), (num_layers, 1))  # -1: free
        self.slot_of_expert = np.full((num_layers, num_experts), -1, np.int32)  # -1: asleep
        self.slot_of_expert[:, :num_slots] = self.expert_of_slot
        self._decay = 0.5 ** (1 / half_life_steps)
        self._score = np.zeros((num_layers, num_experts))
        self._seen_s = start_s  # when traffic was seen last
        self._traffic_s = (
            0.0  # of traffic so far, pauses left out: nothing falls asleep by a pause, nor just after it
        )
        self._used_s = np.zeros((num_layers, num_experts))  # that clock when the expert was wanted last
        self._is_new = False  # whether something was seen since the last decision

    @property
    def num_resident(self) -> int:
        return int((self.expert_of_slot >= 0).sum())

    def observe(self, tokens: np.ndarray, num_steps: int, now_s: float) -> None:
        """A launch was read: tokens [L, E] of all its steps. Since the one before, LONGEST_GAP_S of traffic at most passed."""
        num_steps = max(1, num_steps)
        self._score *= self._decay**num_steps
        self._score += np.minimum(tokens, num_steps)  # steps that wanted the expert, at most
        self._score += tokens / np.maximum(tokens.max(axis=1, keepdims=True), 1)
        if tokens.any():
            self._traffic_s += min(now_s - self._seen_s, LONGEST_GAP_S)
            self._seen_s, self._is_new = now_s, True
            self._used_s[tokens > 0] = self._traffic_s

    def decide(self, settings: ResidencySettings) -> ResidencyChange:
        """Free the slots of what was long unused, then let the most wanted asleep experts in. The tables change at once:
        the caller must carry the wakes out before the next launch.
        """
        if not self._is_new:
            return ResidencyChange()
        self._is_new = False
        slept = self._put_to_sleep(settings.sleep_after_s)
        wakes = []
        best = [self._best(layer) for layer in range(len(self._score))] if settings.max_swaps else []
        gains = np.array([self._gain(b, settings.wake_margin) for b in best])
        while len(wakes) < settings.max_swaps and gains.size and gains.max() > 0:
            layer = int(gains.argmax())
            wakes.append(self._wake(layer, best[layer]))
            best[layer] = self._best(layer)
            gains[layer] = self._gain(best[layer], settings.wake_margin)
        num_kept = sum(
            b.score > b.victim_score and gain <= 0 for b, gain in zip(best, gains.tolist(), strict=True)
        )
        return ResidencyChange(tuple(wakes), slept, num_kept)

    def _put_to_sleep(self, sleep_after_s: float) -> tuple[tuple[int, int], ...]:
        is_stale = self._traffic_s - self._used_s > sleep_after_s
        self._score[is_stale] = 0  # or it would wake at once into the slot that it left
        is_stale &= self.slot_of_expert >= 0
        if not is_stale.any():
            return ()
        layers, experts = np.nonzero(is_stale)
        self.expert_of_slot[layers, self.slot_of_expert[layers, experts]] = -1
        self.slot_of_expert[layers, experts] = -1
        return tuple(zip(layers.tolist(), experts.tolist(), strict=True))

    def _best(self, layer: int) -> "_Best":
        """The most wanted asleep expert of a layer, and the slot that it would take."""
        scores, slots = self._score[layer], self.expert_of_slot[layer]
        expert = int(np.where(self.slot_of_expert[layer] < 0, scores, -1.0).argmax())
        if self.slot_of_expert[layer, expert] >= 0:  # all are resident
            return _Best(expert, -1.0, 0, 0.0)
        held = np.where(slots >= 0, scores[slots], -1.0)
        slot = int(held.argmin())
        return _Best(expert, float(scores[expert]), slot, max(0.0, float(held[slot])))

    @staticmethod
    def _gain(best: "_Best", margin: float) -> float:
        return best.score - (1 + margin) * best.victim_score

    def _wake(self, layer: int, best: "_Best") -> Wake:
        evicted = int(self.expert_of_slot[layer, best.slot])
        if evicted >= 0:
            self.slot_of_expert[layer, evicted] = -1
        self.expert_of_slot[layer, best.slot] = best.expert
        self.slot_of_expert[layer, best.expert] = best.slot
        return Wake(layer, best.slot, best.expert, evicted if evicted >= 0 else None)


@dataclass(frozen=True)
class _Best:
    expert: int
    score: float
    slot: int
    victim_score: float
