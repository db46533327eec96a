"""The policy's sentences, as small answers."""

import pytest

from runtime.schedule.plan import Phase
from runtime.schedule.policy import SchedulePolicy, choose_decode_steps, choose_phase, limit_burst

POLICY = SchedulePolicy(max_prefills_in_a_row=2, max_waste=0.25)


@pytest.mark.parametrize(
    ("can_prefill", "can_decode", "in_a_row", "expected"),
    [
        (False, False, 0, None),
        (True, False, 9, Phase.PREFILL),
        (False, True, 0, Phase.DECODE),
        (True, True, 0, Phase.PREFILL),
        (True, True, 1, Phase.PREFILL),
        (True, True, 2, Phase.DECODE),
    ],
)
def test_prefill_first_but_not_for_long(can_prefill, can_decode, in_a_row, expected):
    phase = choose_phase(POLICY, can_prefill=can_prefill, can_decode=can_decode, prefills_in_a_row=in_a_row)
    assert phase is expected


@pytest.mark.parametrize(
    ("remaining", "max_steps", "expected"),
    [
        ([100], 8, 8),
        ([3], 8, 3),  # never more than any row can use
        ([1] + [100] * 7, 8, 8),  # 7 of 64 row-steps idle: one row near its end holds nobody back
        ([1, 100], 8, 2),  # at 2 steps 1 of 4 is idle, at 3 steps 2 of 6
        ([1, 1, 1, 100], 8, 1),  # at 2 steps 3 of 8 would be idle
        ([2, 2, 2, 100], 8, 3),  # 3 of 12, exactly a quarter
        ([5], 1, 1),
    ],
)
def test_decode_steps_waste_at_most_a_quarter(remaining, max_steps, expected):
    assert choose_decode_steps(POLICY, remaining, max_steps) == expected


def test_a_burst_takes_no_longer_than_the_target_between_tokens():
    assert limit_burst(8, 0.004, 0.1) == 8
    assert limit_burst(8, 0.015, 0.1) == 6
    assert limit_burst(8, 0.5, 0.1) == 1
    assert limit_burst(8, 0.0, 0.1) == 8  # nothing measured yet
