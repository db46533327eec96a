"""Load: how much of the tightest resource is in use, and what a larger rung would make of it. Imports no JAX.

A queue is no resource: it says that more is asked for, not that more can be given.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig

MAX_LOAD = 1e6  # keeps arithmetic finite whatever was measured
MIN_TARGET_S = 1e-6


class Resource(StrEnum):
    STEP_TIME = "step_time"  # of the target between tokens
    KV_PAGES = "kv_pages"
    EXPERTS = "experts"
    EXCHANGE = "exchange"  # of the target between tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Use of the tightest resource; 1 is all there is, and more is possible for times."""

    value: float
    resource: Resource


def resource_load(obs: Observation, config: EngineConfig) -> Load | None:
    """The tightest resource; None if rows run and the time of their step is not known."""
    uses = resource_uses(obs, config)
    if obs.num_running > 0 and Resource.STEP_TIME not in uses:
        return None
    resource = max(uses, key=lambda r: uses[r], default=None)
    return Load(uses[resource], resource) if resource is not None else Load(0.0, Resource.STEP_TIME)


def resource_uses(obs: Observation, config: EngineConfig) -> dict[Resource, float]:
    """Use of each resource that is known now. While no row runs, step, experts and exchange are left out: their
    last numbers tell of rows that have left."""
    uses = {Resource.KV_PAGES: _kv_use(obs, config)} if obs.num_pages > 0 else {}
    if obs.num_running > 0:
        parts = {
            Resource.STEP_TIME: _share_of_itl(obs.decode_step_s, config),
            Resource.EXPERTS: obs.expert_load,
            Resource.EXCHANGE: _share_of_itl(obs.exchange_s, config),
        }
        uses |= {r: use for r, use in parts.items() if use is not None}
    return {r: min(use, MAX_LOAD) for r, use in uses.items() if math.isfinite(use) and use >= 0}


def _kv_use(obs: Observation, config: EngineConfig) -> float:
    """Scaled, so that `kv_threshold` of the pages counts like the one threshold of the formula: memory may be filled
    further than a step may be slowed, as nothing waits for it before it is full."""
    scale = config.batch_processing.expert_load_threshold / config.controller.kv_threshold
    return obs.used_pages / obs.num_pages * scale


def measured_use(obs: Observation, config: EngineConfig, rung: int) -> float | None:
    """Share of the ITL target that a decode step of `rung` took when it was last measured."""
    share = _share_of_itl(obs.decode_step_s_by_rows.get(rung), config)
    return min(share, MAX_LOAD) if share is not None and math.isfinite(share) and share >= 0 else None


def largest_use(obs: Observation, config: EngineConfig, resource: Resource, rung: int) -> float | None:
    """What use of `resource` cannot exceed at `rung`, judged by its use now; None if that is not known.

    Use grows at most in proportion to rows, as part of it does not depend on them (a step reads the weights once).
    """
    use = resource_uses(obs, config).get(resource)
    return None if use is None else min(use * max(1.0, rung / rows_in_use(obs, resource)), MAX_LOAD)


def rows_in_use(obs: Observation, resource: Resource) -> int:
    """Rows behind the use of a resource: those that run, and for the time of a step the padding too."""
    rows = max(1, obs.num_running)
    if resource is Resource.STEP_TIME:
        return next((r for r in obs.decode_rungs if r >= rows), rows)
    return rows


def _share_of_itl(seconds: float | None, config: EngineConfig) -> float | None:
    return None if seconds is None else seconds / max(config.slo.itl, MIN_TARGET_S)
