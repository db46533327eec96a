"""The cost of moves: chains of placements that can be carried out, stretches in turns, figures that tell a missed aim."""

import argparse

import numpy as np
import pytest

from runtime.bench.move_cost import SETTLING, STRETCH, Stretches, figures, num_transfers, plan_chain, run
from runtime.experts.placement import ExpertPlacement, Move, apply


def test_a_chain_of_placements_is_long_enough_and_fits_from_move_to_move() -> None:
    placement = ExpertPlacement.uniform(2, 8, 4, 3)
    moves, plans_s = plan_chain(placement, 100)
    assert len(moves) >= 100
    assert len(plans_s) >= 2
    for move in moves:
        placement = apply(placement, move)  # raises where a move does not fit


class Mover:
    """Counts turns; no engine behind it."""

    def __init__(self) -> None:
        self.placement, self.num_turns = ExpertPlacement.uniform(1, 8, 4, 3), 0

    def order(self, moves) -> None:
        self.moves = moves

    def turn(self, max_moves: int) -> int:
        self.num_turns += 1
        return max_moves


class Step:
    def __init__(self, num_pairs: int) -> None:
        self.expert_tokens = np.array([[num_pairs]])


def test_moves_come_in_every_second_stretch_of_full_steps() -> None:
    mover = Mover()
    moves = [Move(0, i % 12, 0, (i + 1) % 12) for i in range(2 * STRETCH)]
    steps = Stretches(mover, moves, 2, top_k=2)  # pyright: ignore[reportArgumentType]
    for _ in range(2 * STRETCH):
        steps.before_launch()
        steps.after_read(Step(16))  # pyright: ignore[reportArgumentType]
    assert mover.num_turns == STRETCH
    assert steps.transfers_per_step == 1  # two moves of a layer are one transfer
    times = steps.take()
    # A step that follows a switch, or one that was not full, has no time of its own.
    assert [len(times[moved]) for moved in (False, True)] == [STRETCH - SETTLING, STRETCH - SETTLING]
    steps.after_read(Step(100))  # pyright: ignore[reportArgumentType]
    assert (steps.num_full, steps.take()) == (2 * STRETCH, {False: [], True: []})


@pytest.mark.parametrize(("with_s", "is_met"), [(0.0125, True), (0.0135, False)])
def test_the_aim_is_the_time_of_the_copies_of_a_step(with_s: float, is_met: bool) -> None:
    found = figures([{False: [0.010] * 9, True: [with_s] * 9}] * 3, [0.002] * 5, transfers_per_step=1.5)
    assert found["copy_ms"] == 3
    assert found["p99_excess_ms"] == pytest.approx(1000 * with_s - 10)
    assert (found["is_met"], found["repeats_met"], found["steps_with"]) == (is_met, 3 * is_met, 27)


def test_transfers_are_counted_as_they_are_made() -> None:
    copy, exchange = Move(0, 1, 0, 2), Move(0, 3, 0, 4, True)
    assert num_transfers([copy, Move(0, 5, 0, 6)], [2]) == 1
    assert num_transfers([copy, Move(0, 5, 0, 6)], [1, 1]) == 2  # a step's limit stands between them
    assert num_transfers([copy, Move(1, 5, 0, 6)], [2]) == 2
    assert num_transfers([exchange, copy, copy], [2, 0, 1]) == 3  # an exchange writes two slots


def test_wrong_numbers_are_named() -> None:
    args = argparse.Namespace(devices=9, moves_per_step=2, repeats=8, stretches=16)
    with pytest.raises(ValueError, match=r"--devices must be in \[2, 8\], not 9"):
        run(args)
