"""Plans: moves only where they pay, the most paying layers first, pins kept, and numbers that agree with the moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.balancer import SlotShape, balance
from runtime.experts.move_order import transfers
from runtime.experts.placement import ExpertPlacement, apply
from runtime.experts.rebalance_plan import (
    PlanAnew,
    PlanConfig,
    PlanImprovement,
    plan_anew,
    plan_improvement,
)
from runtime.experts.shares import device_loads, imbalance, slot_shares
from tests.runtime.experts.expert_cases import zipf

START = ExpertPlacement.uniform(4, 32, 4, 9)
LOADS = zipf(4, 32)


def carried_out(plan, placement=START):
    for move in plan.moves:
        placement = apply(placement, move)
    return placement


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([plan_anew, plan_improvement]),
)
@settings(deadline=None, max_examples=60)
def test_a_plan_keeps_its_word(seed, weight, move_s, max_moves, make):
    loads = zipf(4, 32, seed=seed)
    config = PlanConfig(balance_weight=weight, move_s=move_s, max_moves=max_moves, confidence=0)
    plan = make(START, loads, config)
    after = carried_out(plan)
    tables = [device_loads(p, loads, slot_shares(p, loads, weight)) for p in (START, after)]
    np.testing.assert_allclose(plan.imbalance_before, imbalance(tables[0]))
    np.testing.assert_allclose(plan.imbalance_after, imbalance(tables[1]))
    np.testing.assert_allclose(plan.saved_rows, (tables[0].max(1) - tables[1].max(1)).sum(), atol=1e-6)
    assert plan.cost_s == pytest.approx(move_s * len(list(transfers(plan.moves))))
    if make is plan_improvement:
        assert len(plan.moves) <= max_moves
    elif plan.moves:
        assert plan.saving_s > plan.cost_s


def test_two_copies_in_a_layer_cost_what_one_does():
    plan, price = plan_anew(START, LOADS, PlanConfig()), PlanConfig().move_s
    num_copied = sum(2 if move.is_exchange else 1 for move in plan.moves)
    assert num_copied / 2 * price <= plan.cost_s < len(plan.moves) * price


def test_what_costs_more_than_it_saves_is_not_planned():
    for make in (plan_anew, plan_improvement):
        assert make(START, LOADS, PlanConfig()).moves
        assert make(START, LOADS, PlanConfig(move_s=60, plan_life_steps=1)).moves == ()
        short = make(START, LOADS, PlanConfig(plan_life_steps=2))  # 500 rows a step for every move
        assert len(short.moves) < len(make(START, LOADS, PlanConfig()).moves)


def test_layers_that_gain_most_come_first_and_pinned_ones_not_at_all():
    loads = zipf(4, 32) * np.array([1, 5, 2, 1])[:, None]
    plan = plan_improvement(START, loads, PlanConfig(max_moves=1000))
    assert plan.moves[0].layer == 1
    pinned = plan_improvement(START, loads, PlanConfig(max_moves=1000), frozenset({1, 2}))
    assert {move.layer for move in pinned.moves} == {0, 3}
    assert {move.layer for move in plan_anew(START, loads, PlanConfig(), frozenset({1, 2})).moves} == {0, 3}
    for make in (plan_anew, plan_improvement):
        with pytest.raises(ValueError, match=r"pinned_layers must be in \[0, 4\), not \[4\]"):
            make(START, loads, PlanConfig(), frozenset({1, 4}))


def test_a_plan_from_scratch_is_near_perfect():
    assert plan_anew(START, LOADS, PlanConfig()).imbalance_after.max() < 0.02


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_plan_made_in_slices_is_the_same_plan(width, weight):
    start, loads = ExpertPlacement.uniform(5, 32, 4, 9), zipf(5, 32)
    unsure = loads[:, ::-1] * 0.1
    config, pinned = PlanConfig(balance_weight=weight, plan_life_steps=4), frozenset({3})
    making = PlanAnew(start, loads, config, unsure)
    with pytest.raises(ValueError, match="5 layers are not planned yet"):
        making.finish()
    while making.num_left:
        making.advance(width)
    making.advance(width)  # nothing left: nothing happens
    found, whole = making.finish(pinned), plan_anew(start, loads, config, pinned, unsure)
    assert found.moves == whole.moves
    assert {move.layer for move in found.moves} < {0, 1, 2, 4} | {None}
    np.testing.assert_allclose(found.imbalance_after, whole.imbalance_after)
    assert (found.cost_s, found.saved_rows) == pytest.approx((whole.cost_s, whole.saved_rows))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([1, 4]),
)
@settings(deadline=None, max_examples=40)
def test_an_improvement_made_in_slices_is_the_same_plan(seed, width, weight, max_moves, max_rounds):
    start = ExpertPlacement.uniform(5, 32, 4, 9)
    loads = zipf(5, 32, seed=seed) * np.random.default_rng(seed).random((5, 1))
    config = PlanConfig(balance_weight=weight, max_moves=max_moves, max_rounds=max_rounds)
    making = PlanImprovement(start, loads, config, frozenset({3}))
    while making.num_left:
        making.advance(width)
    making.advance(width)  # nothing left: nothing happens
    found, whole = making.finish(), plan_improvement(start, loads, config, frozenset({3}))
    assert found.moves == whole.moves
    np.testing.assert_array_equal(found.imbalance_before, whole.imbalance_before)
    np.testing.assert_array_equal(found.imbalance_after, whole.imbalance_after)
    assert (found.cost_s, found.saved_rows, found.saving_s) == (
        whole.cost_s,
        whole.saved_rows,
        whole.saving_s,
    )


def test_experts_stay_on_their_node():
    config = PlanConfig(num_nodes=2, num_groups=4, max_moves=1000)
    start = balance(LOADS, SlotShape(32, 4, 9, num_groups=4, num_nodes=2))

    def nodes(placement):
        return [[set(n) for n in layer] for layer in placement.slot_experts.reshape(4, 2, -1).tolist()]

    assert all(not one & two for one, two in nodes(start))
    plan = plan_improvement(start, zipf(4, 32, seed=9), config)
    assert plan.moves
    assert nodes(carried_out(plan, start)) == nodes(start)
    anew = carried_out(plan_anew(start, zipf(4, 32, seed=9), config), start)
    assert all(not one & two for one, two in nodes(anew))


@pytest.mark.parametrize(
    ("field", "value"),
    [("row_s", 0), ("move_s", -1), ("plan_life_steps", 0), ("balance_weight", 0.6), ("confidence", float("nan")),
     ("max_moves", 0), ("max_rounds", 0), ("num_nodes", 0), ("num_groups", 0)],
)  # fmt: skip
def test_numbers_are_bounded(field, value):
    with pytest.raises(ValueError, match=f"{field} must be in"):
        PlanConfig(**{field: value})
