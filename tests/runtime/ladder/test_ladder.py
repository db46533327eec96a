"""The ladder covers what it must, wastes what it may, and never offers a rung that is not ready."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import parse_config
from runtime.errors import BucketMiss
from runtime.ladder.bucket import Bucket, decode_bucket, prefill_bucket
from runtime.ladder.ladder import BucketLadder, default_decode_rows, default_prefill_tokens
from runtime.schedule.plan import Phase


def ladder_of(**sections) -> BucketLadder:
    return BucketLadder.from_config(parse_config(sections), max_context=2048)


def test_default_rungs():
    assert default_decode_rows(32) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
    assert default_prefill_tokens(64, 16) == (16, 32, 48, 64)
    ladder = ladder_of()
    assert ladder.prefill[-1] == Bucket(Phase.PREFILL, 512, 16)
    assert ladder.prefill[0] == Bucket(Phase.PREFILL, 16, 1)  # one page holds one row


@given(st.integers(1, 600))
def test_default_rows_end_at_the_limit_and_bound_the_padding(max_rows):
    sizes = default_decode_rows(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    for small, large in pairwise(sizes):
        if small >= 16:
            assert (large - (small + 1)) / large <= 0.2


@given(st.integers(1, 32), st.sets(st.sampled_from(range(12))))
def test_pick_is_the_first_ready_rung_that_covers(rows, ready_indices):
    ladder = ladder_of()
    ready = {b for i, b in enumerate(ladder.decode) if i in ready_indices}
    covering = [b for b in ladder.decode if b in ready and b.tokens >= rows]
    if covering:
        assert ladder.pick(Phase.DECODE, rows, rows, ready.__contains__) == covering[0]
    else:
        with pytest.raises(BucketMiss, match=str(rows)):
            ladder.pick(Phase.DECODE, rows, rows, ready.__contains__)


def test_explicit_rungs_are_aligned_to_pages_and_deduplicated():
    ladder = ladder_of(ladder={"prefill_tokens": [100, 112, 20], "decode_rows": [8, 2, 8]})
    assert [b.tokens for b in ladder.prefill] == [32, 112]
    assert [b.tokens for b in ladder.decode] == [2, 8]


def test_diff_and_order():
    small = ladder_of(ladder={"prefill_tokens": [64], "decode_rows": [1, 2]})
    large = ladder_of(ladder={"prefill_tokens": [64, 128], "decode_rows": [2, 4]})
    add, drop = small.diff(large)
    assert {b.name for b in add} == {"prefill-128x8", "decode-4"}
    assert {b.name for b in drop} == {"decode-1"}
    order = ladder_of().compile_order()
    assert {b.phase for b in order[:2]} == {Phase.PREFILL, Phase.DECODE}
    assert sorted(order) == sorted(ladder_of().rungs)


def test_wrong_ladders_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        BucketLadder((), (decode_bucket(1),))
    with pytest.raises(ValueError, match="sorted"):
        BucketLadder((prefill_bucket(32, 16, 4), prefill_bucket(16, 16, 4)), (decode_bucket(1),))


def test_waste():
    assert decode_bucket(8).waste(6) == 0.25
