import pytest

from runtime.bench.client import RequestTimes
from runtime.bench.sweep_measure import measure_round, steady_window, time_to_token
from runtime.bench.sweep_plan import SweepPlan
from runtime.bench.sweep_warmup import first_decodes
from tests.runtime.bench.fake_loop import FakeLoop, fake_engine


def row(*events: tuple[float, int]) -> RequestTimes:
    return RequestTimes(4, 0.0, [at for at, _ in events], [num for _, num in events])


def test_the_window_holds_only_launches_of_all_rows() -> None:
    early = row((1, 1), (2, 2), (3, 2), (5, 4), (6, 4), (7, 4), (8, 2))
    late = row((4, 1), (5, 4), (6, 4), (7, 4), (8, 4), (9, 8))
    window = steady_window([early, late])
    # starts at 5, the second event of the late row; ends before 8, where the early row ends
    assert (window.seconds, window.num_tokens, window.num_steps) == (2, 16, 8)
    assert window.step_s == 0.25
    assert window.tokens_s == 8


def test_a_window_without_company_is_an_error_and_not_a_fast_figure() -> None:
    early = row((1, 1), (2, 8), (3, 8), (4, 8))
    late = row((3.5, 1), (4, 8), (5, 8), (6, 8))
    with pytest.raises(RuntimeError, match=r"2 rows ran together for 0\.0 steps"):
        steady_window([early, late])
    with pytest.raises(RuntimeError, match="fewer than three launches"):
        steady_window([row((1, 1), (2, 8))])


def test_time_to_a_token_counts_from_submission() -> None:
    times = row((2, 1), (3, 8), (4, 8))
    assert [time_to_token(times, n) for n in (1, 2, 9, 10)] == [2, 3, 3, 4]
    with pytest.raises(ValueError, match="17 tokens, fewer than 18"):
        time_to_token(times, 18)


def test_a_round_measures_every_case_and_odd_rounds_go_backwards() -> None:
    loop = FakeLoop(step_s=0.01)
    engine = fake_engine(loop)
    plan = SweepPlan((1, 4), 12, 20, ((4, 8), (1, 32)), (16, 17), 2)
    first, second = (measure_round(engine, plan, index) for index in range(2))
    loop.stop()
    assert list(first.decode) == list(second.decode)[::-1] == [1, 4]
    assert set(first.shapes) == {(4, 8), (1, 32)}
    assert set(first.lengths) == {16, 17}
    for found in (first, second):
        one, four = found.decode[1].window, found.decode[4].window
        assert one.step_s >= 0.01
        assert four.tokens_s == pytest.approx(4 / four.step_s)
        assert found.decode[4].request_s >= 20 * 0.01
    assert len(set(loop.prompts)) == len(loop.prompts)  # nothing a cache could help


def test_the_first_decode_launch_stands_beside_later_ones() -> None:
    loop = FakeLoop(step_s=0.002)
    engine = fake_engine(loop)
    found = first_decodes(engine, (1, 4))
    loop.stop()
    assert [f.batch for f in found] == [1, 4]
    assert all(f.first_s >= 0.002 and f.later_s >= 0.002 for f in found)
