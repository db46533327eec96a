"""Orders and live settings that come between any two slices of what the balancing is thinking of."""

import pytest

from tests.runtime.engine.expert_engine import LAYERS, Served


@pytest.mark.parametrize("num_turns", range(4 * LAYERS))
def test_all_of_an_order_is_made_whatever_is_thought_of_when_it_comes(num_turns):
    """Learning, about to ask the controller, planning: its moves never take the place of the operator's."""
    served = Served(slice_s=1.0)
    while served.balancing.status().forecast is None:
        served.step(step_share=0.9)
    for _ in range(num_turns):  # no window ends
        served.balancing.turn(served.now_s, 0.9)
    before = served.mover.num_applied
    applied = served.order(rebalance="apply")
    while not applied.done():
        served.step(step_share=0.9)
    num_moves = applied.result().num_moves
    assert num_moves > 0
    for _ in range(num_moves):
        if served.balancing.status().reason == "ordered":
            served.step(step_share=0.9)
    assert served.mover.num_applied == before + num_moves
