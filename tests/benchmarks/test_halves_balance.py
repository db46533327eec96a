"""The cut that the benchmark judges is the one that the step makes."""

import pytest

from benchmarks.halves_balance import LINEAR_KEYS, best_cut, measure, work
from runtime.model.halves import choose_cut
from tests.runtime.model.builders import Chunk, pack_prefill


@pytest.mark.parametrize("chunks", [[(700, 0)], [(100, 6400), (300, 0), (64, 0)], [(1000, 0)]])
def test_cuts_where_the_step_does(chunks) -> None:
    batch = pack_prefill([Chunk([1] * num, [1], start) for num, start in chunks], 64, 2, 1024, 4)
    assert best_cut(chunks, 512) == int(choose_cut(batch, 64, LINEAR_KEYS))


def test_work_is_all_of_it_and_nearly_halved() -> None:
    chunks = [(700, 0), (100, 6400)]
    first, second = work(chunks, best_cut(chunks, 512))
    assert first + second == pytest.approx(700 * (LINEAR_KEYS + 350) + 100 * (LINEAR_KEYS + 6450))
    forms = measure([chunks])
    assert forms["by work"]["imbalance"] <= forms["middle"]["imbalance"]
    assert forms["by work, 1/8 more room"]["padding_us_a_step"] > 0
