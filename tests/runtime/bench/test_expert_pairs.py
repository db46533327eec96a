"""The figures for pairs keep the order that they must have."""

from runtime.bench.expert_pairs import pair_quality


def test_no_plan_is_below_its_bound_and_no_foresight_costs():
    found = pair_quality(144, 1, num_layers=3)
    own, later = found["own_loads"], found["next_window"]
    assert 0 <= own["plan_above_bound"] < 0.01
    assert later["bound"] < later["least_without_foresight"] < later["true_rates"]
    assert later["plan_above_bound"] > later["least_above_bound"] > 0
