"""Page ids, the order of the free list, and what a wrong call says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.page_allocator import PageAllocator


def test_pages_are_handed_out_from_one_up_and_return_to_the_front():
    pages = PageAllocator(6)
    assert pages.free_list() == [1, 2, 3, 4, 5]
    assert pages.allocate(2) == [1, 2]
    assert pages.allocate(1) == [3]
    pages.release([1, 2])
    assert pages.free_list() == [1, 2, 4, 5]
    assert pages.num_free == 4
    assert pages.num_used == 1
    pages.check_integrity()


def test_a_shared_page_is_free_after_its_last_holder():
    pages = PageAllocator(4)
    a = pages.allocate(2)
    pages.share(a)
    pages.release(a)
    assert [pages.ref_count(p) for p in a] == [1, 1]
    assert pages.num_free == 1
    pages.release([2])
    assert pages.free_list() == [2, 3]


def test_kept_pages_are_reused_last_and_the_end_of_a_prefix_before_its_beginning():
    taken: list[int] = []
    pages = PageAllocator(7)
    pages.on_take = taken.append
    a, b = pages.allocate(3), pages.allocate(2)
    for page_id in (*a, *b):
        pages.keep(page_id)
    pages.release(a)
    pages.release(b)
    assert pages.free_list() == [6, 3, 2, 1, 5, 4]
    assert pages.num_kept == 5
    assert pages.allocate(3) == [6, 3, 2]
    assert taken == [3, 2]
    pages.share([1])  # found again in time: no longer among the free
    assert pages.free_list() == [5, 4]
    pages.release([1])
    assert pages.free_list() == [5, 4, 1]
    pages.check_integrity()


def test_a_forgotten_page_is_reused_first():
    pages = PageAllocator(4)
    a = pages.allocate(2)
    pages.keep(a[0])
    pages.release(a)
    assert pages.free_list() == [2, 3, 1]
    pages.forget(1)
    assert pages.free_list() == [1, 2, 3]


def test_wrong_calls_name_the_numbers():
    pages = PageAllocator(4)
    with pytest.raises(ValueError, match="asked for 4 pages, 3 are free"):
        pages.allocate(4)
    assert pages.num_free == 3
    with pytest.raises(ValueError, match="page 2 is released but has no holder"):
        pages.release([2])
    with pytest.raises(ValueError, match="page 2 is free and holds nothing"):
        pages.share([2])
    with pytest.raises(ValueError, match="page 2 has no holder"):
        pages.keep(2)
    with pytest.raises(ValueError, match="num_pages is 1"):
        PageAllocator(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from("arskf"), st.integers(0, 11)), max_size=60))
def test_no_order_of_calls_loses_a_page(num_pages: int, calls: list[tuple[str, int]]):
    pages = PageAllocator(num_pages)
    held: list[int] = []
    for verb, number in calls:
        if verb == "a" and number <= pages.num_free:
            order = pages.free_list()
            assert pages.allocate(number) == order[:number]
            held += order[:number]
        elif held:
            page_id = held[number % len(held)]
            if verb == "r":
                held.remove(page_id)
                pages.release([page_id])
            elif verb == "s":
                held.append(page_id)
                pages.share([page_id])
            elif verb == "k":
                pages.keep(page_id)
            else:
                pages.forget(page_id)
        pages.check_integrity()
        assert all(pages.ref_count(p) == held.count(p) for p in range(num_pages))
