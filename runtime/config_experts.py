"""ExpertsConfig: which experts lie in the device's memory. Imports no JAX."""

from runtime.config_fields import Section, live, restart
from runtime.config_values import Duration


class ExpertsConfig(Section):
    """Which experts lie in the device's memory; the rest wait in the host's. On one device."""

    resident_experts: int = restart(
        0,
        "expert slots of a layer on the device; the experts beyond them sleep; 0: all lie there",
        ge=0,
        le=4096,
    )
    prefetch_experts: int = restart(
        0, "asleep experts that a layer fetches ahead for the next one, at most", ge=0, le=8
    )
    sleep_after: Duration = live(
        "10min", "so much traffic without an expert, pauses left out, frees its slot", gt=0
    )
    swaps_per_step: int = live(4, "experts woken between two steps at most", ge=0, le=1024)
    wake_margin: float = live(
        0.1,
        "by how much of a resident expert's demand an asleep one must be ahead to take its slot",
        ge=0,
        le=16,
    )
