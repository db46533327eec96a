"""ExpertResidency: what steps asked of the experts in, weights from host to device out. Owned by the engine's thread.

Between two launches it asks `runtime.experts.residency` who wakes and who sleeps, copies at most `experts.swaps_per_step`
experts into slots, and writes the tables of the layers that changed: the next launch reads both, launches before it the
old ones. Nothing is compiled.
"""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from runtime.adaptive.decision import DecisionLog
from runtime.config import EngineConfig
from runtime.engine.device_commands import SetSlots, WakeWeights
from runtime.engine.engine import Engine
from runtime.engine.expert_status import ResidencyStatus
from runtime.engine.residency_shape import ResidencyShape
from runtime.experts.residency import (
    AsleepColumn,
    Residency,
    ResidencyChange,
    ResidencyReason,
    ResidencySettings,
)


class ExpertResidency:
    """One for an engine whose experts may sleep."""

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        shape: ResidencyShape,
        decisions: DecisionLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._engine, self._shape, self._decisions, self._clock = engine, shape, decisions, clock
        self._layers = np.flatnonzero(
            shape.is_sparse
        )  # all below is of these: the others have nothing to put to sleep
        num_layers = len(self._layers)
        self._residency = Residency(num_layers, shape.num_experts, shape.num_slots, start_s=clock())
        self._rows = np.zeros(num_layers, np.int64)  # of experts, since the start
        self._asleep = np.zeros((num_layers, len(AsleepColumn)), np.int64)
        self._num_steps = 0
        self._reasons: Counter[str] = Counter()  # since the start, as told
        self._untold: Counter[str] = Counter()  # since the log was written last
        self._told_s, self._told_resident = clock(), self._residency.num_resident

    def on_step(self, expert_tokens: np.ndarray, asleep: np.ndarray, num_steps: int) -> None:
        """A launch was read: tokens [L, E] and what was asleep [L, AsleepColumn], of all its steps."""
        tokens = expert_tokens[self._layers]
        self._rows += tokens.sum(axis=1)
        self._asleep += asleep[self._layers]
        self._num_steps += max(1, num_steps)
        self._residency.observe(tokens, num_steps, self._clock())

    def turn(self, now_s: float) -> None:
        """Between two launches: decide, copy, tell."""
        experts = self.config.experts
        settings = ResidencySettings(experts.sleep_after, experts.swaps_per_step, experts.wake_margin)
        change = self._residency.decide(settings)
        for wake in change.wakes:
            self._engine.change_slots(WakeWeights(int(self._layers[wake.layer]), wake.expert, wake.slot))
        for place in change.layers:
            table = self._residency.slot_of_expert[place].copy()
            self._engine.change_slots(SetSlots(int(self._layers[place]), table))
        self._note(change)
        if now_s - self._told_s >= self.config.batch_processing.dynamic_adjust_window and self._untold:
            self._tell(now_s)

    def status(self) -> ResidencyStatus:
        shape, rows, num_layers = self._shape, int(self._rows.sum()), len(self._layers)
        asleep, layer_rows = self._asleep.sum(axis=0).tolist(), self._rows.tolist()
        layer_asleep = self._asleep[:, AsleepColumn.ROWS].tolist()
        return ResidencyStatus(
            num_slots=shape.num_slots,
            num_experts=shape.num_experts,
            num_resident=self._residency.num_resident,
            slot_experts=tuple(map(tuple, self._residency.expert_of_slot.tolist())),
            layers=tuple(self._layers.tolist()),
            num_steps=self._num_steps,
            layer_rows=tuple(layer_rows),
            layer_asleep_rows=tuple(layer_asleep),
            hit_rates=tuple(
                (all_rows - missed) / all_rows if all_rows else None
                for all_rows, missed in zip(layer_rows, layer_asleep, strict=True)
            ),
            resident_rows=rows - asleep[AsleepColumn.ROWS],
            asleep_rows=asleep[AsleepColumn.ROWS],
            late_fetches=asleep[AsleepColumn.LATE],
            prefetches_used=asleep[AsleepColumn.STAGED_USED],
            prefetches_unused=asleep[AsleepColumn.STAGED_UNUSED],
            changes={r.value: self._reasons[r] + self._untold[r] for r in ResidencyReason},
            device_bytes=num_layers * shape.num_slots * shape.expert_bytes,
            host_bytes=num_layers * shape.num_experts * shape.expert_bytes,
        )

    def _note(self, change: ResidencyChange) -> None:
        self._untold[ResidencyReason.EVICTED] += sum(w.evicted is not None for w in change.wakes)
        self._untold[ResidencyReason.WOKE] += sum(w.evicted is None for w in change.wakes)
        self._untold[ResidencyReason.SLEPT] += len(change.slept)
        self._untold[ResidencyReason.KEPT_BY_HYSTERESIS] += change.num_kept
        self._untold = +self._untold  # without zeros

    def _tell(self, now_s: float) -> None:
        """One decision for each reason of the last window: swaps are too many to be told one by one."""
        before, after, rows = self._told_resident, self._residency.num_resident, int(self._rows.sum())
        hit_rate = 1 - int(self._asleep[:, AsleepColumn.ROWS].sum()) / rows if rows else None
        for reason, number in self._untold.items():
            inputs = {"times": number, "hit_rate_since_start": hit_rate}
            self._decisions.add(now_s, "expert_residency", before, after, str(reason), inputs)
        self._reasons.update(self._untold)
        self._untold.clear()
        self._told_s, self._told_resident = now_s, after
