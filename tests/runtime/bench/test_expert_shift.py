"""A shift through the controller: moves count once applied, and copies share by the step's own counts."""

import numpy as np

from runtime.bench.expert_shift import RunningServer, replay_shift, skew_model
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.rebalancing import RebalanceConfig
from runtime.experts.shares import device_loads
from tests.runtime.experts.expert_cases import zipf


def test_a_shift_is_repaired_within_the_limit_of_moves():
    found = replay_shift(32, 9, num_seeds=1, moves_per_step=8, balance_weight=0.5, num_steps=50)
    assert found["after_shift_50_steps"] <= 0.25
    assert found["old_placement"] > 0.6
    assert found["moves"] <= 8 * 50
    assert found["after_steps"]["1"] > found["after_shift_50_steps"]
    assert found["step_after_50_steps"] < found["step_after_50_steps_shared_equally"]


def test_the_skew_model_stays_below_its_bound():
    found = skew_model(1e-6)
    assert 1.5 < found["critical_path_gain"] <= found["bound"]


def test_a_step_is_served_by_the_placement_from_before_it():
    counts = np.round(zipf(3, 32)).astype(np.int64)
    start = ExpertPlacement.uniform(3, 32, 4, 9)
    server = RunningServer.start(
        start, RebalanceConfig(moves_per_step=5, plan=PlanConfig(max_moves=40)), counts
    )
    np.testing.assert_array_equal(server.serve(counts), device_loads(start, counts))
    moved = server.placement
    assert 0 < server.num_moves <= 5
    np.testing.assert_array_equal(server.serve(counts), device_loads(moved, counts))
