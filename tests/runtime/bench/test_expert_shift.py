"""A shift through the controller: moves count once applied, and copies share by the step's own counts."""

import numpy as np

from runtime.bench.expert_shift import ASKED_EVERY, RunningServer, replay_shift, skew_model
from runtime.experts.placement import ExpertPlacement
from runtime.experts.rebalance_plan import PlanConfig
from runtime.experts.shares import device_loads
from tests.runtime.experts.expert_cases import zipf


def test_a_shift_is_repaired_within_the_limit_of_moves():
    found = replay_shift(32, 9, num_seeds=1, moves_per_step=8, balance_weight=0.5, num_steps=50, plan_steps=1)
    assert found["after_shift_50_steps"] <= 0.25
    assert found["old_placement"] > 0.6
    assert found["moves"] <= 8 * 50
    assert found["after_steps"]["1"] > found["after_shift_50_steps"]
    assert found["step_after_50_steps"] < found["step_after_50_steps_shared_equally"]


def test_a_plan_that_is_made_longer_than_the_steps_moves_nothing():
    found = replay_shift(
        32, 9, num_seeds=1, moves_per_step=8, balance_weight=0.5, num_steps=15, plan_steps=30
    )
    assert found["moves"] == 0


def test_the_skew_model_stays_below_its_bound():
    found = skew_model(1e-6)
    assert 1.5 < found["critical_path_gain"] <= found["bound"]


def test_a_window_is_served_by_the_placement_from_before_it():
    counts = np.round(zipf(3, 32)).astype(np.int64)
    start = ExpertPlacement.uniform(3, 32, 4, 9)
    server = RunningServer.start(start, PlanConfig(max_moves=40), moves_per_step=5, plan_steps=1, seen=counts)
    for _ in range(ASKED_EVERY - 1):
        server.serve(counts)
    assert server.placement is start
    np.testing.assert_array_equal(server.loads(counts), device_loads(start, counts))
    for _ in range(3):  # asked, planned in two slices
        server.serve(counts)
    assert 0 < server.num_moves <= 10
    np.testing.assert_array_equal(server.loads(counts), device_loads(server.placement, counts))
