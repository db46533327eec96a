"""What the host reads of a launch is what the device wrote: each chunk's own tokens, and as many steps as ran."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.launched import read_tokens


@given(st.data())
def test_each_column_has_the_tokens_that_it_produced(data):
    made = data.draw(
        st.lists(st.integers(0, 5), min_size=1, max_size=6)
    )  # steps in which each row was active
    room = data.draw(st.integers(max(made), 8))
    output = np.zeros((2, room, len(made)), np.int32)
    output[0] = 99  # where nothing was produced the id says nothing
    expected = []
    for column, steps in enumerate(made):
        ids = data.draw(st.lists(st.integers(0, 98), min_size=steps, max_size=steps))
        output[0, :steps, column], output[1, :steps, column] = ids, 1
        expected.append(tuple(ids))
    columns = tuple(data.draw(st.permutations(range(len(made)))))
    tokens, num_steps = read_tokens(output, columns)
    assert tokens == tuple(expected[c] for c in columns)
    assert num_steps == max(made)
    assert all(type(token) is int for found in tokens for token in found)  # JSON takes no numpy number


def test_a_launch_in_which_nothing_ran_has_no_tokens():
    assert read_tokens(np.zeros((2, 4, 3), np.int32), (2, 0)) == (((), ()), 0)
